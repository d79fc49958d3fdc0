"""Every test runs in float64, from one seed, on one thread."""

import math
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.tensor  # assert_close would, in seconds, within some test's time limit
from hypothesis import settings

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, by whoever is first
for name in ("HF_HOME", "HF_HUB_OFFLINE", "FORCE_COLOR", "REHEAD_NATIVE", "MAKEFLAGS", "MAKELEVEL"):
    os.environ.pop(name, None)  # a user's own, which the tests and the commands they start would follow
for name in ("NO_PROXY", "no_proxy"):  # some tests serve on this machine
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a background job of a shell script, as `nohup make test &` is
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whose children would inherit that


def _no_network(event, given):
    """Refuses connections to other machines; an audit hook cannot be taken away again."""
    if event == "socket.connect" and isinstance(given[1], tuple) and not _is_local(str(given[1][0])):
        raise OSError(f"a test connects to {given[1][0]}: tests use no network")


def _is_local(host):
    return host in ("localhost", "::1", "0.0.0.0") or host.startswith("127.")


sys.addaudithook(_no_network)

torch.set_num_threads(1)  # also for fixtures that are set up before a test, such as a module's

settings.register_profile("rehead", derandomize=True, deadline=None)
settings.load_profile("rehead")


def pytest_sessionstart():
    """A slow run says no more than a quick one, and keeps no text in the user's cache, which later runs would read."""
    from rehead.conversion import sampled
    from rehead.report import lines

    sampled.LONG = lines.SOON = lines.EVERY = math.inf


def pytest_addoption(parser):
    parser.addoption(
        "--few", action="store_true", help="contract tests on a few examples of every variant, no long tests"
    )
    parser.addoption("--nightly", action="store_true", help="reliability tests that draw far more faults")


@pytest.fixture
def nightly(request):
    """Whether reliability tests take the whole night."""
    return request.config.getoption("nightly")


def pytest_collection_modifyitems(config, items):
    """Marks `docs` and `browser` by folder and fixture; leaves out what its marks say, much with --few.

    With --nightly no test has a time limit.
    """
    for item in items:
        if config.getoption("nightly"):
            item.add_marker(pytest.mark.timeout(0), append=False)
        if "docs" in item.path.parts[-3:]:
            item.add_marker(pytest.mark.docs)
        if "chromium" in item.fixturenames:
            item.add_marker(pytest.mark.browser)
    left_out = []
    unfit = ("mistyped", "compiled") if config.getoption("jaxtyping_packages") else ("typed",)
    left_out += [item for item in items if any(map(item.get_closest_marker, unfit))]
    if config.getoption("few"):
        many = _many()
        left_out += [item for item in items if "contract" in item.path.parts and many & _ids(item)]
        left_out += [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def _many():
    """Examples that --few leaves out: of every variant it keeps the first, and those with both rope and a window."""
    from rehead.attention import variants

    others = [list(variants[name].examples().items())[1:] for name in variants]
    return {name for name, config in chain(*others) if not (config.rope and config.window)}


def _ids(item):
    """The ids of its parameters."""
    return set(item.callspec.id.split("-")) if hasattr(item, "callspec") else set()


@pytest.fixture(autouse=True)
def _exact():
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
    torch.set_num_threads(1)  # for what the next file's fixtures make


@pytest.fixture
def switch():
    """switch(mode): which of rehead's own kernels may run, as REHEAD_NATIVE says it; as before after the test."""
    from rehead import native

    before = native.mode()
    yield native.use
    native.use(before)


@pytest.fixture(scope="session")
def by_loops():
    """Attention as the seeds write it (A2-A4): one head and one query at a time, in NumPy."""

    def attend(query, key, value, seen=None, *, scale=None, reads=None):
        q, k, v = (t.detach().double().numpy() for t in (query, key, value))
        (B, L, H, E), S, K = q.shape, k.shape[1], k.shape[2]
        out = np.zeros((B, L, H, v.shape[-1]))
        for b, i, h in np.ndindex(B, L, H):
            kept = [j for j in range(S) if seen is None or seen[b % len(seen), i, j]]
            kv_head = h // (H // K) if reads is None else reads(h)
            if kept:
                logits = k[b, kept, kv_head] @ q[b, i, h] * (E**-0.5 if scale is None else scale)
                weights = np.exp(logits - logits.max())
                out[b, i, h] = weights @ v[b, kept, kv_head] / weights.sum()
        return torch.from_numpy(out)

    return attend


@pytest.fixture(scope="session")
def chromium():
    """A headless browser: the system's Chromium, driven by playwright. Skips where one of them is missing."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine")
    root = ["--no-sandbox"] * (os.geteuid() == 0)
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=root)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """opened(file, width, scheme): the page of an HTML file. It must load nothing else and log no error."""
    pages, faults = [], []

    def refuse(dialog):
        faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open_page(file, width=1200, scheme="light"):
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(page)
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", refuse)
        address = file.resolve().as_uri()
        page.on(
            "request",
            lambda sent: (
                None if sent.url.startswith((address, "data:", "blob:")) else faults.append(sent.url)
            ),
        )
        page.goto(address)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not faults


@pytest.fixture(scope="session")
def until():
    """until(page, expression): wait for JavaScript to become true, also where a page forbids to evaluate strings."""

    def wait(page, expression):
        for _ in range(200):
            if page.evaluate(expression):
                return
            page.wait_for_timeout(50)
        raise AssertionError(f"never became true: {expression}")

    return wait


def none_ignored():
    """In a new process: handle the signals that a background job, or nohup, has it ignore."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Command(subprocess.Popen[bytes]):
    """`rehead` with these words, in a process group of its own; what it says is in the file `said`."""

    def __init__(self, words, said, before, environment):
        self.said = Path(said)
        program = [*before, str(Path(sys.executable).parent / "rehead"), *words]
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
        with self.said.open("w") as file:
            super().__init__(
                program,
                env=given,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
                preexec_fn=none_ignored,
            )


@pytest.fixture
def start():
    """start(words, before=(), NAME=VALUE): a command, `before` it another program; none outlives its test."""
    begun: list[Command] = []

    def begin(*words, before=(), **environment):
        begun.append(Command(words, f"said-{len(begun)}", before, environment))
        return begun[-1]

    yield begin
    for process in begun:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
