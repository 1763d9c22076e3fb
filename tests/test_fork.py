"""After fork(): workers of a DataLoader, and children that quantize and train themselves. Everything in a process of
its own with a time limit, since what goes wrong here hangs."""

from __future__ import annotations

import pytest
from helpers import run_python

#: A child that hangs is killed after this.
TIMEOUT = 90

FORK = """
import os, sys, signal

def in_child(work):
    \"\"\"Run `work` in a forked child with an alarm; its exit code must be 0.\"\"\"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(40)
            work()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status}"
"""


def run(code: str) -> str:
    return run_python(
        FORK + code, timeout=TIMEOUT, env={"OMP_NUM_THREADS": "1", "DAF_NUM_THREADS": "2", "PYTHONWARNINGS": "ignore"}
    )


def test_quantize_in_a_child_after_the_parent_used_its_pool() -> None:
    out = run("""
import torch, daf_rs
x = torch.randn(1 << 21)
expected = daf_rs.quantize(x, bits=4, seed=1, threads=2).to_bytes()

def work():
    for threads in (1, 2):
        q = daf_rs.quantize(x, bits=4, seed=1, threads=threads)
        assert q.to_bytes() == expected
        daf_rs.dequantize(q)

in_child(work)
assert daf_rs.quantize(x, bits=4, seed=1, threads=2).to_bytes() == expected
print("done")
""")
    assert out.strip() == "done"


def test_what_the_parent_quantized_can_be_read_in_a_child() -> None:
    out = run("""
import torch, daf_rs
x = torch.randn(1 << 20)
q = daf_rs.quantize(x, bits=4, seed=1)
expected = daf_rs.dequantize(q)

def work():
    assert torch.equal(daf_rs.dequantize(q), expected)
    import gc
    global q2
    q2 = daf_rs.quantize(x, bits=2, seed=1)
    del q2
    gc.collect()

in_child(work)
assert torch.equal(daf_rs.dequantize(q), expected), "the child's frees reached the parent"
q3 = daf_rs.quantize(x, bits=4, seed=1)
assert torch.equal(daf_rs.dequantize(q3), expected)
print("done")
""")
    assert out.strip() == "done"


def test_fresh_noise_in_parent_and_child_differs() -> None:
    out = run("""
import torch, daf_rs
x = torch.randn(4096)
read, write = os.pipe()

def work():
    os.write(write, daf_rs.dequantize(daf_rs.quantize(x, bits=2)).numpy().tobytes()[:4096])

in_child(work)
child = os.read(read, 4096)
parent = daf_rs.dequantize(daf_rs.quantize(x, bits=2)).numpy().tobytes()[:4096]
print("same" if child == parent else "different")
""")
    # A seed from a process-wide counter goes on in both; that they may agree is no error, that they hang would be.
    assert out.strip() in ("same", "different")


@pytest.mark.parametrize("backward_in_parent", [False, True])
def test_training_in_a_child(backward_in_parent: bool) -> None:
    out = run(f"""
import torch, daf_rs
x = torch.randn(512, 512, requires_grad=True)
saved = daf_rs.save_compressed(8, min_bytes=0)

def step():
    x.grad = None
    with saved:
        y = ((x * 1.0) * (x * 2.0)).sum()
    y.backward()
    error = (x.grad - 4 * x.detach()).norm() / x.detach().norm()
    assert error < 0.1, error
    assert saved.stats().live_bytes == 0

if {backward_in_parent}:
    step()

def forward_only():
    with saved:
        y = ((x * 1.0) * (x * 2.0)).sum()
    assert saved.stats().packs >= 2
    assert saved.stats().live_bytes > 0
    assert (y.grad_fn.next_functions[0][0]._saved_self - x).abs().max() < 0.1

# PyTorch itself refuses backward in a child once the parent has run one.
in_child(forward_only if {backward_in_parent} else step)
step()
print("done")
""")
    assert out.strip() == "done"


def test_a_graph_of_the_parent_can_run_backward_in_a_child() -> None:
    out = run("""
import torch, daf_rs
x = torch.randn(512, 512, requires_grad=True)
with daf_rs.save_compressed(8, min_bytes=0) as saved:
    y = ((x * 1.0) * (x * 2.0)).sum()

def work():
    y.backward()
    assert (x.grad - 4 * x.detach()).abs().max() < 0.5

in_child(work)
y.backward()
assert (x.grad - 4 * x.detach()).abs().max() < 0.5
assert saved.stats().live_bytes == 0
print("done")
""")
    assert out.strip() == "done"


@pytest.mark.parametrize("use_in_worker", [False, True])
def test_a_data_loader_with_forked_workers(use_in_worker: bool) -> None:
    out = run(f"""
import torch, daf_rs
from torch.utils.data import DataLoader, Dataset

USE = {use_in_worker}

class Data(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(index))
        if USE:
            x = daf_rs.dequantize(daf_rs.quantize(x, bits=8, seed=1, threads=2))
            w = x.clone().requires_grad_()
            with daf_rs.save_compressed(8, min_bytes=0):
                (w * w).sum()
        return x

model = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.GELU(), torch.nn.Linear(128, 1))
saved = daf_rs.save_compressed(4, model=model)
daf_rs.quantize(torch.randn(1 << 21), bits=4, threads=2)
seen = 0
for epoch in range(2):
    loader = DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=40)
    with saved:
        for batch in loader:
            loss = model(batch).pow(2).mean()
            loss.backward()
            seen += len(batch)
            del loss
assert seen == 64
assert saved.stats().live_bytes == 0
print("done")
""")
    assert out.strip() == "done"


def test_forking_while_another_thread_packs() -> None:
    out = run("""
import threading, torch, daf_rs
x = torch.randn(1 << 20)
stop = threading.Event()

def busy():
    while not stop.is_set():
        daf_rs.dequantize(daf_rs.quantize(x, bits=4, threads=2))

thread = threading.Thread(target=busy)
thread.start()

def work():
    q = daf_rs.quantize(x[: 1 << 18], bits=4, seed=1, threads=2)
    daf_rs.dequantize(q)

try:
    for _ in range(10):
        in_child(work)
finally:
    stop.set()
    thread.join()
print("done")
""")
    assert out.strip() == "done"


def test_a_pool_of_processes() -> None:
    out = run("""
import multiprocessing, torch, daf_rs
x = torch.randn(1 << 18)
expected = daf_rs.quantize(x, bits=4, seed=3).to_bytes()

def work(index):
    return daf_rs.quantize(x, bits=4, seed=3) if index else daf_rs.quantize(x, bits=4, seed=3, threads=1)

with multiprocessing.get_context("fork").Pool(2) as pool:
    for q in pool.map(work, range(4)):
        assert q.to_bytes() == expected
print("done")
""")
    assert out.strip() == "done"
