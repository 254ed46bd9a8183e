"""MicroGen: a small LLM inference engine, written as notebooks.

Kept by hand, and lazy: importing the package loads nothing else; each name comes from its module when first used.
"""
__all__ = ["LLM", "SamplingParams", "serve", "__version__"]

_HOME = {"LLM": "engine", "SamplingParams": "sampling", "serve": "api"}


def __getattr__(name):
    if name == "__version__": value = _version()
    elif name in _HOME: value = _load(name)
    else: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__(): return sorted({*globals(), *__all__})


def _load(name):
    from importlib import import_module
    module = f"{__name__}.{_HOME[name]}"
    try: return getattr(import_module(module), name)
    except ModuleNotFoundError as e:
        if e.name != module: raise
        raise ImportError(f"this version of MicroGen has no {name!r} yet: it comes with the module {module}") from None


def _version():
    "The installed distribution's version; from a checkout that is not installed, settings.ini's."
    from importlib.metadata import PackageNotFoundError, version
    try: return version("microgen-engine")
    except PackageNotFoundError: pass
    import configparser
    from pathlib import Path
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(Path(__file__).parents[1] / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"].get("version", "unknown")
