"""Many clients at once against `microgen serve`, a process of its own with the default model. `make clients` runs it.

    python experiments/clients.py [--seconds 60] [--clients 64] [--model NAME] [--only storm,stop]

storm  streams come and go, of which some are left at random: every token arrives once and in order, and in the end
       the server is as if nobody had been there
stop   SIGTERM while streams run: all are ended properly, nobody new is let in, and the process ends in time
"""
import argparse, asyncio, contextlib, json, random, re, signal, socket, statistics, subprocess, sys, tempfile, time, urllib.error, urllib.request
from collections import Counter
from pathlib import Path


# In the server's process


def serve(record: str, model: str, *options: str):
    "`microgen serve`, writing every sequence that ends, as the engine knows it, to the file `record`."
    from microgen.cli.main import cli
    from microgen.engine import Engine
    file, end = open(record, "a", encoding="utf-8", buffering=1), Engine._end

    def recorded(self, request, out, news):
        text = self.tokenizer.decode(request.output_token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        line = dict(prompt=request.prompt_token_ids, ids=request.output_token_ids, reason=out.finish_reason, text=text)
        file.write(json.dumps(line) + "\n")
        return end(self, request, out, news)

    Engine._end = recorded
    if model == "tiny":
        from microgen.testing import rand_model
        model = str(rand_model(path=Path(record).parent / "tiny"))
    cli(["serve", "--model", model, *options])


# In the clients' process


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as r: return r.status, r.read().decode()
    except urllib.error.HTTPError as e: return e.code, e.read().decode()
    except OSError as e: return 0, str(e)


def metrics(url: str) -> dict[str, float]:
    "Name (and reason, if any) -> value."
    status, page = get(f"{url}/metrics")
    assert status == 200, page
    found = re.findall(r'^([\w:]+)(?:\{(.*)\})? (\S+)$', page, re.M)
    reason = lambda labels: next(iter(re.findall(r'(?:^|,)(?:finished_)?reason="(.*?)"', labels)), "")
    return {name + (f"[{r}]" if (r := reason(labels)) else ""): float(value) for name, labels, value in found if "le=" not in labels}


def books(page: dict[str, float]) -> dict[str, float]:
    ended = {r: page[f"vllm:request_success_total[{r}]"] for r in ("stop", "length", "abort", "error")}
    rejected = sum(v for k, v in page.items() if k.startswith("vllm:admission_rejections_total"))
    return ended | dict(rejected=rejected, running=page["vllm:num_requests_running"], waiting=page["vllm:num_requests_waiting"])


@contextlib.contextmanager
def server(model: str, *options: str):
    "A server that is ready: its process, its address, and the file of what its engine did."
    with tempfile.TemporaryDirectory() as folder, socket.socket() as s, open(Path(folder) / "log", "w+", encoding="utf-8") as log:
        s.bind(("127.0.0.1", 0))
        port, record = s.getsockname()[1], Path(folder) / "record.jsonl"
        s.close()
        command = [sys.executable, __file__, "serve", str(record), model, "--port", str(port), *options]
        process, end = subprocess.Popen(command, stderr=log), time.monotonic() + 300
        url = f"http://127.0.0.1:{port}"
        try:
            while get(f"{url}/health")[0] != 200:
                assert process.poll() is None and time.monotonic() < end, f"the server did not start: {Path(log.name).read_text()[-2000:]}"
                time.sleep(.1)
            yield process, url, record
        except BaseException:
            print("The end of the server's log:", Path(log.name).read_text(encoding="utf-8")[-3000:], sep="\n", file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()


def records(path: Path) -> dict[tuple, list[dict]]:
    "Prompt -> what the engine did with it."
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        d = json.loads(line)
        found.setdefault(tuple(d["prompt"]), []).append(d)
    return found


def idle(url: str, seconds: float = 5) -> dict[str, float]:
    "The metrics, once nothing runs, waits or holds a block; fails if that takes longer than `seconds`."
    end, gauges = time.monotonic() + seconds, ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any((page := metrics(url))[g] for g in gauges):
        assert time.monotonic() < end, {g: page[g] for g in gauges}
        time.sleep(.05)
    rows = books(page)
    assert page["microgen:request_submitted_total"] == sum(rows.values()), (page["microgen:request_submitted_total"], rows)
    return page


async def stream(client, name: str, prompt: str, max_tokens: int, rng: random.Random, leave: float = 0) -> dict:
    "One streamed completion; with probability `leave` the client leaves, after some tokens or some time."
    got = dict(prompt=None, ids=[], text="", reason=None, left=False)
    tokens, patience = (rng.randrange(max_tokens), rng.choice([.05, .5, 60])) if rng.random() < leave else (None, 600)
    try:
        async with asyncio.timeout(patience):
            events = await client.completions.create(model=name, prompt=prompt, max_tokens=max_tokens, temperature=1, stream=True, extra_body=dict(return_token_ids=True))
            async with events:
                async for event in events:
                    for c in event.choices:
                        got["prompt"] = got["prompt"] or c.model_extra.get("prompt_token_ids")
                        got["ids"] += c.model_extra.get("token_ids") or []
                        got["text"] += c.text
                        got["reason"] = c.finish_reason or got["reason"]
                    if tokens is not None and len(got["ids"]) > tokens: break
                    if rng.random() < .01: await asyncio.sleep(.3)                                # a slow reader
    except TimeoutError: assert tokens is not None, f"no end after {patience} s"
    got["left"] = got["reason"] is None
    return got


def compare(streams: list[dict], made: dict[tuple, list[dict]]) -> Counter:
    "Every stream against the engine's record: whole ones equal, abandoned ones a beginning of it. Counts of each."
    kinds = Counter()
    for got in streams:
        if got["prompt"] is None: kinds["left before the first token"] += 1; continue
        record, = made[tuple(got["prompt"])]                                                       # the engine did it once
        if got["left"]: assert got["ids"] == record["ids"][:len(got["ids"])], (got, record)
        else: assert all(got[k] == record[k] for k in ("ids", "reason", "text")), (got, record)
        kinds["left" if got["left"] else "whole"] += 1
    return kinds


def asynchronous(url: str, clients: int):
    import openai
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def storm(model: str, clients: int, seconds: float):
    "Many clients for a while; then everything must be as if nobody had been there."
    with server(model, "--num-blocks", "300") as (_, url, record):    # a pool that has been used throughout before the memory is looked at
        name, rss, streams, end = json.loads(get(f"{url}/v1/models")[1])["data"][0]["id"], [], [], time.monotonic() + seconds

        async def visitor(client, i: int):
            rng, k = random.Random(i), 0
            while time.monotonic() < end:
                streams.append(await stream(client, name, f"Client {i} asks for the {k}. time: tell me about", rng.randint(4, 48), rng, leave=.4))
                k += 1

        async def watch():
            while time.monotonic() < end:
                page = await asyncio.to_thread(metrics, url)
                rss.append(page["process_resident_memory_bytes"] / 2**20)
                await asyncio.sleep(min(1, seconds / 20))

        async def everybody():
            async with asynchronous(url, clients) as client, asyncio.TaskGroup() as group:
                group.create_task(watch())
                for i in range(clients): group.create_task(visitor(client, i))

        asyncio.run(everybody())
        page = idle(url)
        made = records(record)
        kinds = compare(streams, made)
        assert page["vllm:generation_tokens_total"] == sum(len(r["ids"]) for rs in made.values() for r in rs)
        engine = json.loads(get(f"{url}/server_info")[1])["engine"]
        assert engine["kv_blocks_free"] == engine["kv_blocks_total"], engine
        quarter = len(rss) // 4
        growth = statistics.median(rss[-quarter:]) - statistics.median(rss[quarter:2 * quarter])
        assert growth < 32, f"resident memory grew by {growth:.0f} MiB between the second and the last quarter"
    return (f"storm: {clients} clients, {seconds:.0f} s, {len(streams)} streams ({', '.join(f'{n} {k}' for k, n in sorted(kinds.items()))}), "
            f"{engine['generated_tokens']} tokens, each once; pool whole; memory {growth:+.1f} MiB")


def stop(model: str, clients: int, seconds: float, grace: float = 10):
    "SIGTERM in the middle: streams end with a reason, nobody else is let in, and the process ends in time."
    with server(model, "--grace", str(grace)) as (process, url, record):
        name = json.loads(get(f"{url}/v1/models")[1])["data"][0]["id"]

        async def everybody():
            rng = random.Random(0)
            async with asynchronous(url, clients) as client:
                running = [asyncio.create_task(stream(client, name, f"Client {i} tells a story:", 400, rng)) for i in range(clients)]
                while metrics(url)["vllm:generation_tokens_total"] < clients: await asyncio.sleep(.05)
                start = time.monotonic()
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(1)
                late = (await asyncio.gather(stream(client, name, "Too late", 4, rng), return_exceptions=True))[0]
                return await asyncio.gather(*running), late, start

        streams, late, start = asyncio.run(everybody())
        code = process.wait(grace + 15)
        took = time.monotonic() - start
        assert isinstance(late, Exception) and getattr(late, "status_code", 503) == 503, late
        assert all(s["reason"] in ("stop", "length", "abort") for s in streams), Counter(s["reason"] for s in streams)
        compare(streams, records(record))
        assert code in (0, 1) and took < grace + 10, (code, took)
    return f"stop: {clients} streams ended ({dict(Counter(s['reason'] for s in streams))}), exit code {code} after {took:.1f} s of {grace:.0f} allowed"


CHECKS = dict(storm=storm, stop=stop)

if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]: sys.exit(serve(*sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="'tiny': a small random one")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60, help="of the storm")
    parser.add_argument("--only", default=",".join(CHECKS), help=f"some of {','.join(CHECKS)}")
    args = vars(parser.parse_args())
    for name in args.pop("only").split(","): print(CHECKS[name](**args), flush=True)
