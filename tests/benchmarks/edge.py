"""The edge against a bare ONNX Runtime script: a call, a cold start, memory at rest, a swap under load, size
installed.

make bench NAME=edge ARGS="--quick --json"
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: its ``profile`` would hide the standard library's

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from mcp_client.edge.runtime import EdgeRuntime, OnnxModel
from mcp_client.edge.variants import optimise
from mcp_client.request import Request
from tests.benchmarks.graphs import RESNET, bert_base, bert_inputs, resnet50

BOUND = 0.05  # of the largest output: what the best variant may be off by

BARE = """
import sys, numpy as np, onnxruntime as ort
session = ort.InferenceSession(sys.argv[1] + "/m/1/model.onnx")
x = np.ones((1, 512), np.float32)
session.run(None, {"x": x})
"""
OURS = """
import sys, numpy as np
from mcp_client import MCPClient
client = MCPClient("edge:" + sys.argv[1])
x = np.ones((1, 512), np.float32)
client.infer(x)
"""
AT_REST = """
import gc, os
gc.collect()
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")][0], flush=True)
os._exit(0)
"""


def layers(path: Path, *, count: int, width: int, seed: int = 0) -> Path:
    """``count`` layers of ``width`` × ``width`` weights: 10 MB for 10 of 512."""
    rng = np.random.default_rng(seed)
    nodes, weights, last = [], [], "x"
    for number in range(count):
        weights.append(
            numpy_helper.from_array(rng.standard_normal((width, width), np.float32) / 32, f"w{number}")
        )
        nodes.append(helper.make_node("MatMul", [last, f"w{number}"], [f"p{number}"]))
        last = "y" if number == count - 1 else f"h{number}"
        nodes.append(helper.make_node("Relu", [f"p{number}"], [last]))
    specs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", specs[:1], specs[1:], weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def variants(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Each variant of ResNet-50 and BERT-base: speed-up over the graph as ONNX Runtime optimises it at every load
    (``speedup``) and over the graph with no optimisation at all (``over_unoptimised``); output error, size.

    ``quick``: BERT with 2 of the 12 layers and 1,000 of the 30,522 words, and without its slowest variants.
    """
    rng = np.random.default_rng(1)
    pictures = [{"gpu_0/data_0": rng.standard_normal((1, 3, 224, 224)).astype(np.float32)} for _ in range(4)]
    words = 1000 if quick else 30522
    bert = bert_base(folder / "bert.onnx", layers=2 if quick else 12, words=words)
    texts = bert_inputs(4, words=words)
    quickest = ("fused", "int8_dynamic") if quick else ()
    found = {}
    for name, path, feeds, only in (
        ("resnet50", resnet50(folder / "resnet50.onnx"), pictures, ("fused", "int8_static") if quick else ()),
        ("bert_base", bert, texts, quickest),
    ):
        measured = optimise(path, folder / f"{name}-variants", feeds, rounds=4 if quick else 12, only=only)
        plain = unoptimised_over_original(path, feeds[0], rounds=4 if quick else 12)
        found[name] = {
            each.name: each.fault
            or {
                "speedup": measured[0].ms / each.ms,
                "over_unoptimised": plain * measured[0].ms / each.ms,
                "error": each.error,
                "mb": each.nbytes / 1e6,
            }
            for each in measured
        }
    return found


def unoptimised_over_original(path: Path, feed: dict[str, np.ndarray], *, rounds: int) -> float:
    """Time of the graph as it is written over that of the graph as ONNX Runtime optimises it."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    plain, model = ort.InferenceSession(str(path), options), OnnxModel(path)
    contenders = {"plain": lambda: plain.run(None, feed), "model": lambda: model.run(feed)}
    in_turn(contenders, rounds=1, calls=1)
    times = in_turn(contenders, rounds=rounds, calls=1)
    return times["plain"] / times["model"]


def in_turn(contenders: dict[str, Callable[[], object]], *, rounds: int, calls: int) -> dict[str, float]:
    """Median seconds per call of each, measured A B A B … so that a busy machine is busy for all."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            started = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - started) / calls)
    return {name: statistics.median(each) for name, each in times.items()}


def run_over_bare(folder: Path, *, quick: bool) -> dict[str, float]:
    """One call of ``OnnxModel`` and of ``EdgeRuntime`` over ``InferenceSession.run``, for a tiny model
    and ResNet-50.
    """
    found = {}
    tiny = layers(folder / "tiny" / "1" / "model.onnx", count=1, width=3)
    for name, path, x, calls in (
        ("tiny", tiny, {"x": np.ones((1, 3), np.float32)}, 1000),
        ("resnet50", RESNET, {"gpu_0/data_0": np.ones((1, 3, 224, 224), np.float32)}, 1),
    ):
        bare, model = ort.InferenceSession(str(path)), OnnxModel(path)
        runtime = EdgeRuntime(path)
        request = Request(model="", inputs=x)
        rounds = (40 if name == "tiny" else 15) // (2 if quick else 1)
        times = in_turn(
            {
                "bare": lambda bare=bare, x=x: bare.run(None, x),  # type: ignore[misc]
                "model": lambda model=model, x=x: model.run(x),  # type: ignore[misc]
                "runtime": lambda runtime=runtime, request=request: runtime.run(request),  # type: ignore[misc]
            },
            rounds=rounds,
            calls=calls,
        )
        found[name] = times["model"] / times["bare"]
        found[f"{name}_runtime"] = times["runtime"] / times["bare"]
        runtime.close()
    return found


def processes(folder: Path, *, rounds: int) -> tuple[float, float]:
    """Cold start over that of a bare script, and memory at rest above it in MB; each a median."""
    layers(folder / "m" / "1" / "model.onnx", count=10, width=512)
    # As installed by pip, which compiles what it installs: no process of these may compile the package anew.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    seconds: dict[str, list[float]] = {BARE: [], OURS: []}
    kilobytes: dict[str, list[int]] = {BARE: [], OURS: []}
    for number in range(rounds + 1):
        for script in (BARE, OURS):
            started = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", script + "import os; os._exit(0)", str(folder)], check=True, env=env
            )
            took = time.perf_counter() - started
            said = subprocess.run(
                [sys.executable, "-c", script + AT_REST, str(folder)],
                check=True,
                capture_output=True,
                env=env,
            )
            if number:  # the first round fills the page cache and keeps the optimised graph
                seconds[script].append(took)
                kilobytes[script].append(int(said.stdout))
    cold = statistics.median(seconds[OURS]) / statistics.median(seconds[BARE])
    return cold, (statistics.median(kilobytes[OURS]) - statistics.median(kilobytes[BARE])) / 1024


def hot_swap(folder: Path, *, swaps: int) -> tuple[float, int]:
    """Milliseconds from a new 10 MB file to calls that use it (verified, loaded, warmed), and calls that
    failed meanwhile.
    """
    fresh = [
        layers(folder / f"{number}.tmp", count=10, width=512, seed=number) for number in range(swaps + 1)
    ]
    path = folder / "swap" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    fresh[0].replace(path)
    runtime = EdgeRuntime(folder, check_s=3600.0)
    request = Request(model="swap", inputs={"x": np.ones((1, 512), np.float32)})
    runtime.run(request)
    done, failed = threading.Event(), []

    def call() -> None:
        while not done.wait(0.005):
            try:
                runtime.run(request)
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    times = []
    for file in fresh[1:]:
        before = runtime.metadata("swap").digest
        file.replace(path)
        started = time.perf_counter()
        runtime.refresh()
        times.append(time.perf_counter() - started)
        assert runtime.metadata("swap").digest != before
    done.set()
    for thread in threads:
        thread.join()
    runtime.close()
    return statistics.median(times) * 1000, len(failed)


def installed_mb(extras: set[str]) -> float:
    """Size on disk of this distribution and all that it needs with ``extras``, as installed here."""
    from packaging.requirements import Requirement

    todo, seen, total = [("mcp2026", frozenset(extras))], set(), 0
    while todo:
        name, wanted = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        total += sum(
            Path(str(file.locate())).stat().st_size
            for file in found.files or []
            if Path(str(file.locate())).is_file()
        )
        for text in found.requires or []:
            needed = Requirement(text)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *wanted)
            ):
                todo.append((needed.name, frozenset(needed.extras)))
    own = Path(__file__).parents[2] / "mcp_client"
    return (total + sum(file.stat().st_size for file in own.rglob("*.py"))) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results["run_over_bare_ort"] = run_over_bare(folder / "run", quick=options.quick)
        cold, rss = processes(folder / "cold", rounds=3 if options.quick else 9)
        results["cold_start_over_bare_ort"], results["rss_over_bare_ort_mb"] = cold, rss
        milliseconds, failed = hot_swap(folder / "hot", swaps=5 if options.quick else 20)
        results["hot_swap_ms"], results["swap_failed_calls"] = milliseconds, failed
        results["variants"] = variants(folder, quick=options.quick)
        good = {
            model: {name: each for name, each in found.items() if isinstance(each, dict)}
            for model, found in results["variants"].items()
        }
        results["optimised_speedup"] = {
            model: max(each["over_unoptimised"] for each in found.values() if each["error"] <= BOUND)
            for model, found in good.items()
        }
        results["int8_speedup"] = {
            model: max(
                (each["speedup"] for name, each in found.items() if name.startswith("int8")), default=None
            )
            for model, found in good.items()
        }
    results["installed_mb"] = installed_mb({"edge", "disk"})
    if options.json:
        print(json.dumps(results))
        return
    for key, value in results.items():
        print(f"{key:28} {value}")


if __name__ == "__main__":
    main()
