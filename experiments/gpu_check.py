"""Is it right, how fast is it, and how much fits, on the GPU of this machine? Needs torch, triton, numpy, psutil and tqdm.

    python experiments/gpu_check.py [--parts checks,attention,decode,capacity] [--blocks 30] [--minutes 9] [--dry-run]

checks     Triton attention against the reference, recorded decode steps against unrecorded ones, an engine with both
attention  one layer of a decode step: the kernel that reads blocks in place against gathering and PyTorch's attention
decode     whole calls on random weights of given shapes: recorded, unrecorded, and transformers.generate where it is installed
capacity   how many texts of 2,048 tokens decode side by side in 1 GiB of keys and values

Raw samples go to $OUT, or else to experiments/; results that are no samples to gpu_check.json there. --dry-run does all of it
with tiny shapes on the CPU, Triton in its interpreter, and writes to a temporary folder: it shows that the script runs, no more.
"""
import argparse, contextlib, importlib.util, itertools, json, os, random, sys, tempfile, time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--parts", default="checks,attention,decode,capacity")
parser.add_argument("--blocks", type=int, default=30)
parser.add_argument("--minutes", type=float, default=9, help="after these, parts that have not begun are left out")
parser.add_argument("--dry-run", action="store_true")
args = parser.parse_args()
if args.dry_run: os.environ["TRITON_INTERPRET"] = "1"      # before Triton is imported

root = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(root))
import torch
from microgen.attention import attention_reference, attention_sdpa, plan_attention
from microgen.bench import Comparison, machine, repeated, summary, table, trials
from microgen.cuda_graphs import GraphExecutor
from microgen.engine import build_engine
from microgen.kv_cache import KV_CACHE_DTYPES, StepInput, block_bytes, make_pool
from microgen.models import Decoder, LocalExecutor, ModelConfig, limit_window, weight_map
from microgen.quantization import quantize_linear
from microgen.sampling import SamplingParams
from microgen.testing import filled_pool, random_step
from microgen.triton_attention import attention_triton

dry = args.dry_run
if not dry and not torch.cuda.is_available(): sys.exit("this PyTorch sees no CUDA device; --dry-run needs none")
device, fast = torch.device("cpu" if dry else "cuda"), torch.float32 if dry else torch.bfloat16
out = Path(tempfile.mkdtemp()) if dry else Path(os.environ.get("OUT", root / "experiments"))
capture = dict(capture=lambda run, memory: run) if dry else {}
found = dict(machine=machine(), torch=torch.__version__, dry_run=dry)
missing = [name for name in ("triton", "psutil", "tqdm") if importlib.util.find_spec(name) is None]
if missing: sys.exit(f"not installed: {', '.join(missing)}")


def shape(layers, hidden, inner, heads, kv_heads, vocab, head_dim=64, **more) -> ModelConfig:
    rope = dict(rope_type="default", rope_theta=100000.0)
    return ModelConfig(**dict(family="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers, num_heads=heads,
                              num_kv_heads=kv_heads, head_dim=head_dim, max_position=8192, norm_eps=1e-5, rope=rope,
                              tie_word_embeddings=True, windows=(None,) * layers) | more)


TINY = shape(2, 64, 128, 4, 2, 512, head_dim=16)
SHAPES = {"tiny": TINY} if dry else {"SmolLM2-135M": shape(30, 576, 1536, 9, 3, 49152), "Llama-3.2-1B": shape(16, 2048, 8192, 32, 8, 128256)}


def random_model(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    with torch.device(device): return Decoder(config).to(dtype).to_runtime(device)


class Letters:
    "Enough of a tokenizer for an engine that is given token ids."
    def encode(self, text, **_): return [ord(c) % 256 for c in text]
    def decode(self, ids, **_): return "".join(chr(97 + i % 26) for i in ids)


def make_engine(model: Decoder, seats: int, num_blocks: int, dtype: torch.dtype, eager: bool = False, **more):
    return build_engine(model, Letters(), num_blocks, 4096, max_num_seqs=seats, max_num_batched_tokens=8192, dtype=dtype, device=device,
                        enable_prefix_caching=False, enforce_eager=eager, **more)


def generate(engine, prompts, tokens: int, **params) -> list:
    "Run `prompts` to `tokens` tokens each, greedily; the outputs in order, merged."
    ids, top = {}, {}
    for i, prompt in enumerate(prompts):
        engine.add(engine.prepare(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **params), str(i)))
    while engine.has_work:
        for o in engine.step():
            part = o.outputs[0]
            if part.finish_reason == "error": raise RuntimeError(part.stop_reason)
            ids.setdefault(o.request_id, []).extend(part.token_ids); top.setdefault(o.request_id, []).extend(part.logprobs or [])
    return [(ids[str(i)], top[str(i)]) for i in range(len(prompts))]


def random_prompts(n: int, length: int, vocab: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(n)]


# Is it right?


def check_attention() -> float:
    "The largest difference between kernel and reference in float32; 16-bit ones must agree to their rounding."
    worst = 0.0
    for seed in range(3 if dry else 120):
        rng = random.Random(seed); torch.manual_seed(seed)
        heads, kv_heads, d = rng.choice([(9, 3, 64), (32, 8, 64), (8, 8, 128), (4, 4, 16), (5, 1, 32), (2, 2, 1), (6, 6, 3)])
        block_size, window, sinks = rng.choice([1, 4, 16, 24, 64]), rng.choice([None, None, 7, 40, 1000]), rng.choice([0, 3, 70])
        dtype = rng.choice([torch.float32] if dry else [torch.float32, torch.float32, torch.float16, torch.bfloat16])
        step, blocks = random_step(rng, block_size, window, sinks, max_len=60 if dry else rng.choice([60, 700, 3000]))
        pool = filled_pool(step, blocks, block_size, kv_heads, d, dtype, rng.choice(KV_CACHE_DTYPES), device=device)
        q, plan = torch.randn(len(step.token_ids), heads, d, device=device).to(dtype), plan_attention(step, block_size, device, sinks)
        want = attention_reference(q, pool, 0, plan, d ** -.5, window).float()
        for splits in (None, 1, 5):
            error = (attention_triton(q, pool, 0, plan, d ** -.5, window, splits).float() - want).abs().max().item()
            assert error < {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype], (seed, dtype, splits, error)
            if dtype is torch.float32: worst = max(worst, error)
    return worst


def check_graphs() -> float:
    "The largest difference of float32 logits between recorded and unrecorded decode steps, for models with every switch."
    worst, plain = 0.0, dict(tie_word_embeddings=False)
    configs = {"llama": TINY, "window": TINY, "int8 weights": TINY, "int4 weights": TINY, "qk norm, biases": shape(2, 64, 128, 4, 2, 512, head_dim=32, qk_norm=True, qkv_bias=True, **plain),
               "learned positions": shape(2, 64, 128, 4, 4, 512, head_dim=16, family="gpt2", rope=None, rms_norm=False, gated_mlp=False)}
    for name, config in configs.items():
        for kind in ("auto", "int8"):
            model = random_model(config, torch.float32)
            if name == "window": limit_window(model, 24, 4)
            if name.endswith("weights"):
                for path, linear in list(model.layers.named_modules()):
                    if isinstance(linear, torch.nn.Linear): model.layers.set_submodule(path, quantize_linear(linear, name.split()[0]))
            c, blocks = model.config, 40 * 8
            pools = [make_pool(kind, 2, blocks + 1, 16, c.num_kv_heads, c.head_dim, device=device) for _ in range(2)]
            graphs, local = GraphExecutor(model, pools[0], device, 33, 120, "triton", **capture), LocalExecutor(model, pools[1], device, "sdpa")
            for seed, n in enumerate([1, 2] if dry else [*range(1, 34), 7, 33, 1]):
                rng = random.Random(seed); torch.manual_seed(seed)
                step, _ = random_step(rng, 16, c.window, c.attention_sinks, n, 120, decode=True)
                filled = filled_pool(step, blocks + 1, 16, c.num_kv_heads, c.head_dim, torch.float32, kind, 2, device)
                for pool in pools:
                    for a, b in zip(pool.storage(), filled.storage()): a.copy_(b)
                step.token_ids = [rng.randrange(c.vocab_size) for _ in range(n)]
                got, want = graphs.execute(step), local.execute(step)
                error = (got - want).abs().max().item()
                limit = 1e-2 if kind == "auto" and "int8" not in name else 1e-1                # a code may round the other way
                assert error < limit, (name, kind, n, error)
                worst = max(worst, error)
            assert dry or set(graphs.graphs) == {1, 2, 4, 8, 16, 32, 64}, set(graphs.graphs)
    return worst


def check_engine() -> str:
    "Greedy tokens of an engine that records and one that does not, in float32: equal, up to ties."
    model, ties = random_model(SHAPES["tiny" if dry else "SmolLM2-135M"], torch.float32), 0
    prompts = [p[:n] for p, n in zip(random_prompts(24, 300, model.config.vocab_size), itertools.cycle([3, 40, 300]))]
    both = [generate(make_engine(model, 16, 1000, torch.float32, eager), prompts, 8 if dry else 40, logprobs=2) for eager in (True, False)]
    for (want, top), (got, _) in zip(*both):
        at = next((i for i, (a, b) in enumerate(zip(want, got)) if a != b), None)
        if at is None: continue
        best = sorted((p.logprob for p in top[at].values()), reverse=True)
        assert best[0] - best[1] < 1e-3, f"token {at} is {got[at]} recorded, {want[at]} unrecorded, and no tie"
        ties += 1
    return f"{len(prompts)} texts equal, of which {ties} up to a tie"


def checks():
    for name, check in dict(attention=check_attention, graphs=check_graphs, engine=check_engine).items():
        found[f"check_{name}"] = check()
        print(f"{name}: {found[f'check_{name}']}", flush=True)


# How fast is it?


def run_trials(name: str, arms: dict, compare: list):
    path = out / name / f"{machine()}.jsonl"
    run = trials(name, arms, compare, N=2 if dry else args.blocks, warmup=1 if dry else 2, path=path)
    with contextlib.suppress(ImportError): print(summary(run))       # its statistics need scipy and statsmodels
    print(table(run), flush=True)


def synchronised(work, times: int):
    "An arm: `work` called `times` times, then waited for."
    def several():
        for _ in range(times): work()
        if not dry: torch.cuda.synchronize()
    return repeated(several, .01 if dry else .1, per=times)


def attention():
    sizes = [(2, 64)] if dry else [(1, 2048), (8, 2048), (64, 1024), (1, 16384)]
    arms, compare = {}, []
    for (batch, context), kind in itertools.product(sizes, ("auto", "int8")):
        step, rng = StepInput(), random.Random(0)
        blocks = rng.sample(range(batch * context // 16), batch * context // 16)
        for i in range(batch): step.add([0], context - 1, 1, blocks[i * context // 16:(i + 1) * context // 16], 16)
        pool, q = filled_pool(step, len(blocks), 16, 3, 64, fast, kind, device=device), torch.randn(batch, 9, 64, device=device).to(fast)
        plan, label = plan_attention(step, 16, device), f"{batch} × {context}, {'16-bit' if kind == 'auto' else kind}"
        for name, f in dict(gather=attention_sdpa, triton=attention_triton).items():
            arms[f"{name}, {label}"] = synchronised(lambda f=f, a=(q, pool, 0, plan, .125): f(*a), 1 if dry else 20)
        compare.append(Comparison(f"gather, {label}", f"triton, {label}"))
    run_trials("gpu_attention", arms, compare)


def reference_like(model: Decoder):
    "The same weights as a model of transformers, or None where that is not installed."
    if importlib.util.find_spec("transformers") is None: return None
    from transformers import LlamaConfig, LlamaForCausalLM
    c = model.config
    with torch.device(device):
        theirs = LlamaForCausalLM(LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, max_position_embeddings=c.max_position,
            rms_norm_eps=c.norm_eps, rope_parameters=c.rope, tie_word_embeddings=True, eos_token_id=None))
    theirs, state = theirs.to(next(model.parameters()).dtype).eval(), theirs.state_dict()
    with torch.no_grad():
        for name, piece in weight_map(c).items(): model.get_parameter(name).copy_(torch.cat([state[n] for n in piece.names]))
    step = StepInput()
    step.add(prompt := random_prompts(1, 60, c.vocab_size)[0], 0, 60, [2, 0, 1, 3], 16, logits="all")
    ours = LocalExecutor(model, make_pool("auto", c.num_layers, 4, 16, c.num_kv_heads, c.head_dim, dtype=model.norm.weight.dtype, device=device), device).execute(step)
    with torch.no_grad(): want = theirs(torch.tensor([prompt], device=device)).logits[0].float()
    alike = torch.cosine_similarity(ours, want, dim=-1).min().item()
    assert alike > .99, f"logits of our model and transformers' have a cosine of {alike}"
    return theirs


def decode_arms(name: str, model: Decoder, batch: int, tokens: int, prompt: int, theirs) -> dict:
    "Whole calls of `batch` requests: prompts read and `tokens` tokens each."
    prompts = random_prompts(batch, prompt, model.config.vocab_size)
    blocks = batch * (-(-(prompt + tokens) // 16) + 1)
    engines = {label: make_engine(model, batch, blocks, fast, eager) for label, eager in (("unrecorded", True), ("recorded", False))}
    calls = {label: lambda e=engine: generate(e, prompts, tokens) for label, engine in engines.items()}
    if theirs is not None:
        inputs = torch.tensor(prompts, device=device)
        calls["transformers"] = lambda: theirs.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens,
                                                        min_new_tokens=tokens, do_sample=False, pad_token_id=0).cpu()
    arms = {}
    for label, call in calls.items():
        call()                                             # compile, record
        if not dry: torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats()
        call()
        found[f"peak, {name}, {batch}, {label}"] = 0 if dry else torch.cuda.max_memory_allocated()
        timed = repeated(call, .01 if dry else .1)
        arms[f"{label}, {batch}"] = lambda timed=timed: (r := timed()) | dict(tokens_per_s=batch * tokens / r["seconds"])
    return arms


def decode():
    for name, config in SHAPES.items():
        model, arms, compare = random_model(config, fast), {}, []
        theirs = reference_like(model)
        if theirs is None: print("transformers is not installed: no comparison with its generate")
        found[f"weights, {name}"] = sum(p.nbytes for p in model.parameters())
        batches = (1, 2) if dry else (1, 8, 32, 64)
        for batch in batches:
            arms |= decode_arms(name, model, batch, 4 if dry else 16, 16, theirs)
            compare.append(Comparison(f"unrecorded, {batch}", f"recorded, {batch}", "tokens_per_s"))
            if theirs: compare.append(Comparison(f"transformers, {batch}", f"recorded, {batch}", "tokens_per_s", at_least=2 if batch == 1 else None))
        if not dry: compare.append(Comparison("recorded, 1", "recorded, 32", "tokens_per_s", at_least=10))
        print(f"random weights of {name}'s shape, {str(fast)[6:]}:")
        run_trials(f"gpu_decode_{name}", arms, compare)
        del model, theirs, arms
        if not dry: torch.cuda.empty_cache()


# How much fits?


def capacity():
    "Texts of 2,048 tokens that decode in the same step; counted in the engine's log while a fixed pool is under more load than it can hold."
    config, memory, length = next(iter(SHAPES.values())), 2**20 if dry else 2**30, 96 if dry else 2048
    model = random_model(config, fast)
    for kind in ("auto", "int8"):
        num_blocks = memory // block_bytes(config.num_layers, 16, config.num_kv_heads, config.head_dim, fast, kind)
        seats = 2 * num_blocks * 16 // length + 1
        engine = make_engine(model, seats, num_blocks, fast, kv_cache_dtype=kind)
        generate(engine, random_prompts(seats, length - 15, config.vocab_size), 16)         # within their last block, and the last token needs no slot
        at_once = max(sum(context >= length - 15 for _, n, context in step.chunks) for step in engine.log)
        found[f"capacity, {kind}"] = dict(texts=at_once, pool_bytes=engine.executor.pool.nbytes, preemptions=engine.scheduler.preemptions)
        print(f"{kind}: {at_once} texts of {length} tokens at once, {found[f'capacity, {kind}']}")
    found["capacity, ratio"] = found["capacity, int8"]["texts"] / found["capacity, auto"]["texts"]
    print(f"ratio: {found['capacity, ratio']:.2f}")


begin = time.monotonic()
for part in args.parts.split(","):
    spent = time.monotonic() - begin
    if spent > 60 * args.minutes: found.setdefault("left out", []).append(part); print(f"{part}: left out, the time is up"); continue
    print(f"== {part}, after {spent:.0f} s", flush=True)
    dict(checks=checks, attention=attention, decode=decode, capacity=capacity)[part]()
    (out / "gpu_check.json").write_text(json.dumps(found, indent=1))
print(f"done after {time.monotonic() - begin:.0f} s; results in {out if not dry else 'a temporary folder'}")
