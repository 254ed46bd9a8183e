"Package facts live in settings.ini; this file only hands them to setuptools."
import configparser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = configparser.ConfigParser(delimiters=["="], interpolation=None)
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
readme = here / "README.md"

setup(
    name=cfg["name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else cfg["description"],
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license=cfg["license"].upper(),
    license_files=["LICENSE"],
    keywords=cfg["keywords"].split(),
    classifiers=["Programming Language :: Python :: 3", "Topic :: Scientific/Engineering :: Artificial Intelligence"],
    python_requires=">=" + cfg["min_python"],
    packages=find_packages(include=[cfg["lib_name"], cfg["lib_name"] + ".*"]),
    install_requires=cfg["requirements"].split(),
    extras_require={extra: cfg[f"{extra}_requirements"].split() for extra in ("dev", "events", "clients")},
    entry_points={"console_scripts": cfg["console_scripts"].split()},
    package_data={cfg["lib_name"]: ["csrc/*.cpp"]},
    zip_safe=False,
)
