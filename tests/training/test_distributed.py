"""Several processes that train one model, started as a user starts them: with torchrun."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rehead
from rehead.cli.entry import main
from rehead.config import flags
from rehead.errors import ResourceError
from rehead.model import skeleton
from rehead.system import memory
from rehead.system.torchrun import of_torchrun
from rehead.training import start, state
from rehead.training.distributed import Group

TEXT = "A process that is lost is named; what it computed is not. " * 200
ONE = ["trainer.batch_size=8", "trainer.max_iters=20", "trainer.eval_every=10", "trainer.eval_batches=2"]
RUN = [*ONE, "data.block_size=32", "trainer.sample_every=20", "trainer.sample_tokens=8", "trainer.device=cpu"]
RUN += ["data.path=text.txt", "trainer.save_every=10"]
SMALL = ["model.n_layer=2", "model.n_query_head=4", "model.n_embd=32"]
PLAIN = ["model.embd_pdrop=0", "model.resid_pdrop=0", "model.attn_pdrop=0"]
MODELS = {
    "mha": [*SMALL, *PLAIN],
    "gqa": [*SMALL, *PLAIN, "model.n_kv_head=2", "model.rope=True", "trainer.grad_accumulation=2"],
    "mla": [*SMALL, *PLAIN, "model.attention=mla", "model.kv_lora_rank=16", "trainer.recompute=True"],
    "windowed": [*SMALL, *PLAIN, "model.rope=True", "model.window=8"],
    "rnn": [
        "model.type=rnn",
        "model.n_embd=32",
        "model.n_hidden=32",
        "model.n_layer=2",
        "model.embd_pdrop=0",
    ],
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("text.txt").write_text(TEXT)


def changed(*words: str) -> list[str]:
    """Return RUN with some of its flags replaced."""
    names = {word.partition("=")[0] for word in words}
    return [*(word for word in RUN if word.partition("=")[0] not in names), *words]


def torchrun(ranks: int, *words: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*launcher, *(["-m", "rehead"] if words[0] in ("train", "heal") else []), *words]


def run(*command: str) -> str:
    """Run a command line to its end; return its stderr."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def typed(*words: str) -> str:
    return run(sys.executable, "-m", "rehead", *words)


def records(place: str) -> list[dict]:
    return [json.loads(line) for line in Path(place, "metrics.jsonl").read_text().splitlines()]


def steps(place: str) -> list[dict]:
    return [record for record in records(place) if "loss" in record]


def weights(place: str, step: int = 20) -> dict[str, torch.Tensor]:
    return load_file(Path(place, "checkpoints", f"step-{step:06d}", "model.safetensors"))


def moments(place: str, step: int = 20) -> dict[str, torch.Tensor]:
    tensors = load_file(Path(place, "checkpoints", f"step-{step:06d}", state.TENSORS))
    return {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer.")}


def agree(one: str, two: str) -> None:
    """N20: the first loss is equal, those of 20 steps within 5e-6, gradients within 1e-6 and weights within 1e-5."""
    ours, theirs = steps(one), steps(two)
    assert len(ours) == len(theirs) == 20
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=2.5e-7)
    assert [a["loss"] for a in ours] == pytest.approx([b["loss"] for b in theirs], abs=5e-6)
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-6)
    validations = [[r["val_loss"] for r in records(place) if "val_loss" in r] for place in (one, two)]
    assert validations[0] == pytest.approx(validations[1], abs=5e-6)
    held, others = weights(one), weights(two)
    assert held.keys() == others.keys()
    assert max(float((held[name] - others[name]).abs().max()) for name in held) <= 1e-5


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_two_processes_train_as_one_and_resume_as_one():
    typed("train", *RUN, *MODELS["mla"], "system.work_dir=one")
    shown = run(*torchrun(2, "train", *RUN, *MODELS["mla"], "trainer.parallel=fsdp", "system.work_dir=two"))
    agree("one", "two")
    assert shown.count("saved step 20") == 1
    assert len(records("two")) == len(records("one"))
    before = weights("two"), moments("two")
    again = ["system.work_dir=two", "trainer.resume=True", "trainer.parallel=none", "trainer.max_iters=20"]
    typed("train", *again)
    assert (equal(before[0], weights("two")), equal(before[1], moments("two"))) == (True, True)
    assert "processes 2 -> 1" in typed("train", *again[:3], "trainer.max_iters=21", "trainer.sample_every=0")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("model", MODELS)
def test_processes_train_as_one(model, way):
    typed("train", *RUN, *MODELS[model], "system.work_dir=plain")
    for ranks in (1, 2, 4):
        words = f"trainer.parallel={way}", f"system.work_dir={ranks}"
        run(*torchrun(ranks, "train", *RUN, *MODELS[model], *words))
        agree("plain", str(ranks))
    assert equal(weights("plain"), weights("1")), "one process alone computes the same bits"
    assert equal(moments("plain"), moments("1"))


IN_PARTS = """
import sys
from rehead.cli import leave
from rehead.cli.entry import main
from rehead.measure import logits
from rehead.training import loss

mean, taken = loss._mean, []
loss._mean = lambda *given: taken.append(1) or mean(*given)
logits.LOGITS = 1000
code = main(sys.argv[1:])
assert len(taken) == 20
leave(code)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_logits_in_parts_are_those_of_one_process(way):
    """Where a vocabulary is large, the head's gradient is computed in the forward pass."""
    Path("parts.py").write_text(IN_PARTS)
    typed("train", *RUN, *MODELS["mha"], "system.work_dir=plain")
    words = "trainer.grad_accumulation=1", f"trainer.parallel={way}", "system.work_dir=two"
    run(*torchrun(2, "parts.py", "train", *RUN, *MODELS["mha"], *words))
    agree("plain", "two")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_of_two_processes_is_resumed_by_any_number(model):
    """N21: what one, four and two processes read is what two wrote, to the bit."""
    words = [*RUN, *MODELS[model], "trainer.parallel=fsdp", "system.work_dir=run"]
    run(*torchrun(2, "train", *words))
    was = weights("run"), moments("run")
    for ranks in (1, 4, 2):
        run(*torchrun(ranks, "train", *words, "trainer.resume=True"))
        assert equal(was[0], weights("run"))
        assert equal(was[1], moments("run"))
        folder = Path(f"resumed-{ranks}")
        Path("probe.py").write_text(PROBE)
        run(*torchrun(ranks, "probe.py", "run", str(folder)))
        assert equal(was[0], load_file(folder / "model.safetensors"))
        assert equal(was[1], load_file(folder / "moments.safetensors"))


PROBE = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from rehead.checkpoint import own
from rehead.checkpoint.files.deferred import materialise
from rehead.cli import leave
from rehead.config import flags
from rehead.training import state
from rehead.training.ranks import ranks_of
from rehead.training.run import Run

place, out = sys.argv[1], Path(sys.argv[2])
options = flags.read(["trainer.resume=True", "trainer.parallel=fsdp"], (Path(place) / "config.yaml",))
with ranks_of(options) as ranks:
    folder = ranks.folder(Path(place))
    with folder.open(resume=True) as checkpoint:
        run = Run(options, ranks, folder, checkpoint)
        model, optimizer = run.trainer.model, run.trainer.optimizer
        whole = ranks.gathered(model)
        tensors = state.tensors_of(model, optimizer, run.sampler.state(), {}, ranks.deferred)
        held = sum(weight.to_local().nbytes for weight in model.parameters())
        held_moments = sum(
            (value.to_local() if hasattr(value, "to_local") else value).nbytes
            for one in optimizer.state.values() for key, value in one.items() if key != "step"
        )


        def write():
            if ranks.rank == 0:
                out.mkdir()
                own.write(whole, out, {})
                moments = {n: materialise(t) for n, t in tensors.items() if n.startswith("optimizer.")}
                save_file(moments, out / "moments.safetensors")

        ranks.reading(write)
        run.trainer.advance(run.sampler.next)  # in place: the weights of one process are those gathered
        gradients = sum(weight.grad.to_local().nbytes for weight in model.parameters())
        if ranks.rank == 0:
            (out / "bytes").write_text(f"{held} {gradients} {held_moments}")
leave(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_process_holds_its_share():
    """Weights, gradients and moments fall as one over the number of processes."""
    Path("probe.py").write_text(PROBE)
    held = {}
    for ranks in (1, 2, 4):
        words = ["trainer.parallel=fsdp", f"system.work_dir={ranks}"]
        run(*torchrun(ranks, "train", *RUN, *MODELS["gqa"], *words))
        run(*torchrun(ranks, "probe.py", str(ranks), f"held-{ranks}"))
        held[ranks] = [int(word) for word in Path(f"held-{ranks}", "bytes").read_text().split()]
    assert held[1][2] == 2 * held[1][0]
    for ranks in (2, 4):
        for share, whole in zip(held[ranks], held[1], strict=True):
            assert whole / ranks <= share <= whole / ranks * 1.02


GRADIENTS = """
import sys
import torch
from safetensors.torch import save_file
from rehead.cli import leave
from rehead.config import flags
from rehead.data import BatchSampler
from rehead.training import loop
from rehead.training.ranks import ranks_of
from rehead.training.start import start_model

out, every, models = sys.argv[1], sys.argv[2].split(), [one.split() for one in sys.argv[3:]]
loop.build_optimizer = lambda model, options: torch.optim.SGD(model.parameters(), lr=options.learning_rate)
found = {}
with ranks_of(flags.read(every)) as ranks:
    for model_flags in models:
        options = flags.read([*every, *model_flags, "system.seed=0"])
        model = start_model(options, 31, torch.device("cpu"))
        trainer = loop.Trainer(model, options.trainer, None, ranks)
        ids = torch.randint(31, (4000,), generator=torch.Generator().manual_seed(1)).numpy()
        batches = BatchSampler(ids, options.data.block_size, options.trainer.batch_size, 0)
        for step in range(20):
            trainer.advance(batches.next)
            for name, weight in model.named_parameters():
                found[f"{model_flags}.{step}.{name}"] = ranks.deferred(weight.grad.clone())

    def write():
        if ranks.rank == 0:
            save_file({name: value + 0 for name, value in found.items()}, out)

    ranks.reading(write)
leave(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gradients_of_sgd_are_those_of_one_process():
    """N20: every gradient of 20 steps, within 1e-6 of its norm; of one process to the bit.

    That of a bias of keys is 0 but for rounding, so 1e-9 is allowed besides.
    """
    Path("gradients.py").write_text(GRADIENTS)
    every = "trainer.batch_size=8 data.block_size=16 trainer.device=cpu trainer.learning_rate=0.1"
    models = [" ".join(model) for model in MODELS.values()]
    run(sys.executable, "gradients.py", "plain", every, *models)
    plain = load_file("plain")
    assert len({name.partition("]")[0] for name in plain}) == len(MODELS)
    for way in ("fsdp", "ddp"):
        for ranks in (1, 2, 4):
            run(*torchrun(ranks, "gradients.py", way, f"{every} trainer.parallel={way}", *models))
            found = load_file(way)
            assert found.keys() == plain.keys()
            for name, wanted in plain.items():
                allowed = 0 if ranks == 1 else 1e-6 * float(wanted.norm()) + 1e-9
                assert float((found[name] - wanted).norm()) <= allowed, name


WATCHED = """
import sys
import time
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from rehead.checkpoint.files.deferred import Deferred
from rehead.cli import leave
from rehead.cli.entry import main
from rehead.training import distributed

full, wrap, shard = DTensor.full_tensor, distributed.Group.wrap, distributed.fully_shard
gathered, model = [], []

def gather(tensor):
    whole = full(tensor)
    if whole.dim():
        end = time.monotonic() + 10  # a thread of gloo may hold it a moment longer
        while not all(before.expired() for before in gathered):
            assert time.monotonic() < end, "another tensor is whole"
            time.sleep(0.01)
        gathered.append(StorageWeakRef(whole.untyped_storage()))
    return whole

def begin(group, objective):
    model.append(objective.model)
    return wrap(group, objective)

def share(module, **given):
    if model[0] is not getattr(module, "model", None):
        read = {id(w) for w in model[0].parameters() if not isinstance(w, (Deferred, DTensor))}
        assert read == {id(w) for w in module.parameters()}, "another layer has been read"
    return shard(module, **given)

DTensor.full_tensor = gather
if "trainer.resume=True" in sys.argv:
    distributed.Group.wrap, distributed.fully_shard = begin, share
code = main(sys.argv[1:])
assert len(gathered) > 20
leave(code)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_process_holds_more_than_one_tensor_whole():
    """Neither to save, nor to resume."""
    Path("watched.py").write_text(WATCHED)
    words = [*MODELS["gqa"], "trainer.parallel=fsdp", "system.work_dir=run", "trainer.sample_every=0"]
    for more in ("trainer.max_iters=10", "trainer.resume=True"):
        run(*torchrun(2, "watched.py", "train", *changed(*words, more)))


def test_processes_on_a_cpu_have_gradients_and_moments_each(monkeypatch):
    options = flags.read([*changed("trainer.batch_size=4"), "model.n_embd=192"])
    model = skeleton(options.model.resolve(31, 32))
    n_parameter = sum(weight.numel() for weight in model.parameters())
    for world, sharded, numbers in ((1, False, 3), (4, False, 4 * 4), (4, True, 3)):
        needed = []
        monkeypatch.setattr(
            start, "require_memory", lambda work, parts, *_, needed=needed: needed.append(parts)
        )
        start.require_step(options, model, torch.device("cpu"), world, sharded=sharded)
        assert needed[0]["gradients and moments"] == numbers * 4 * n_parameter
        assert "weights" not in needed[0]


def test_a_gpu_needs_memory_for_its_share(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 4 * 10**7)
    options = flags.read([*changed("trainer.batch_size=64"), "model.n_embd=192"])
    model = skeleton(options.model.resolve(31, 32))
    start.require_step(options, model, torch.device("cuda"), 8, sharded=True)
    for device, world, sharded in (("cuda", 1, True), ("cuda", 8, False), ("cpu", 8, True)):
        with pytest.raises(ResourceError, match="a step of"):
            start.require_step(options, model, torch.device(device), world, sharded=sharded)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bfloat16_is_that_of_one_process():
    words = [*RUN, *MODELS["gqa"], "trainer.dtype=bfloat16", "trainer.recompute=True"]
    typed("train", *words, "system.work_dir=plain")
    for ranks in (1, 2):
        run(*torchrun(ranks, "train", *words, "trainer.parallel=fsdp", f"system.work_dir={ranks}"))
    assert equal(weights("plain"), weights("1"))
    assert equal(moments("plain"), moments("1"))
    assert all(weight.dtype == torch.float32 for weight in weights("2").values())
    assert [a["loss"] for a in steps("plain")] == pytest.approx([b["loss"] for b in steps("2")], abs=2e-3)


LONG = changed("trainer.max_iters=200", "trainer.eval_every=200", "trainer.sample_every=0")
LONG += [*SMALL, "trainer.parallel=fsdp"]


def rank_of(launcher: int, rank: int) -> int:
    """Return the process that torchrun started as `rank`."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(process.name)
    raise AssertionError(f"no rank {rank}")


def begun(*command: str, place: str = "run") -> subprocess.Popen:
    """Start a command line; return once it has saved a checkpoint."""
    with Path("log").open("w") as log:
        child = subprocess.Popen(command, stderr=log)
    end = time.monotonic() + 120
    while not Path(place, "checkpoints", "step-000010").exists():
        assert child.poll() is None, Path("log").read_text()[-2000:]
        assert time.monotonic() < end
        time.sleep(0.05)
    return child


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("lost", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_ends_the_others_by_name_and_restarts(lost):
    run(*torchrun(2, "train", *LONG, "system.work_dir=whole"))
    command = torchrun(2, "train", *LONG, "system.work_dir=run")
    child = begun(*command)
    other, start = rank_of(child.pid, 0), time.monotonic()
    os.kill(rank_of(child.pid, 1), lost)
    while Path(f"/proc/{other}").exists() and child.poll() is None:
        assert time.monotonic() - start < 60
        time.sleep(0.1)
    assert child.wait(60) != 0  # torchrun itself waits half a minute for a stopped process
    said = Path("log").read_text()
    assert "rank 1 (" in said if lost == signal.SIGSTOP else "rank      : 1" in said
    run(*command, "trainer.resume=True")
    assert equal(weights("whole", 200), weights("run", 200))
    assert [a["loss"] for a in steps("whole")] == [b["loss"] for b in steps("run")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_torchrun_restarts_from_the_last_good_checkpoint():
    run(*torchrun(2, "train", *LONG, "system.work_dir=whole"))
    command = torchrun(2, "train", *LONG, "system.work_dir=run")
    command[3:3] = ["--max-restarts", "1"]
    child = begun(*command)
    os.kill(rank_of(child.pid, 0), signal.SIGKILL)
    assert child.wait(120) == 0, Path("log").read_text()[-2000:]
    assert equal(weights("whole", 200), weights("run", 200))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigterm_saves_in_all_processes():
    command = torchrun(2, "train", *LONG, "system.work_dir=run")
    child = begun(*command)
    child.terminate()
    assert child.wait(60) != 0
    assert Path("log").read_text().count("rehead: stopped at step") == 1
    assert max(step for step, _ in rehead.checkpoint.find.steps(Path("run"))) == steps("run")[-1]["step"]
    run(*command, "trainer.resume=True")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_healing_shards_the_teacher_too():
    typed("train", *RUN, *MODELS["gqa"], "system.work_dir=source")
    typed("convert", "source", "mla", "--to", "mla", "--kv-rank", "12", "--allow-loss")
    words = [
        "heal",
        "mla",
        "--teacher",
        "source",
        "trainer.max_iters=10",
        "trainer.batch_size=8",
        "trainer.device=cpu",
    ]
    for train in ("all", "attention"):
        typed(*words, f"system.work_dir=one-{train}", f"trainer.train={train}")
        run(
            *torchrun(
                2, *words, f"system.work_dir=two-{train}", f"trainer.train={train}", "trainer.parallel=fsdp"
            )
        )
        one, two = (
            json.loads(Path(f"{n}-{train}/checkpoints/step-000010/conversion.json").read_text())
            for n in ("one", "two")
        )
        assert one["loss"] == pytest.approx(two["loss"], abs=5e-6)
        assert one["logits"]["kl"] == pytest.approx(two["logits"]["kl"], rel=1e-3, abs=1e-7)


def refused(capsys, *words: str) -> str:
    assert main(["train", *RUN, *words]) == 2
    return capsys.readouterr().err


def test_one_process_is_refused_where_several_are_asked_for(capsys):
    assert "needs processes. Start it with torchrun" in refused(capsys, "trainer.parallel=fsdp")
    both = refused(capsys, "trainer.parallel=ddp", "trainer.compile=True")
    assert "trainer.compile=True and trainer.parallel=ddp" in both


def test_several_processes_are_refused_where_one_is_asked_for(capsys, monkeypatch):
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert "2 processes were started to train one run" in refused(capsys)
    assert not Path("out").exists()


ENDING = """
import atexit
import os
import sys
from rehead.cli import main


class Last:
    def __del__(self, write=os.write):
        write(1, b"finalized")


last = Last()
atexit.register(print, "at exit")
sys.argv[1:] = ["train", "trainer.device=none"]
sys.exit(main())
"""


def ended(code, job):
    """A process that runs this code, with what torchrun tells one."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | job,
        check=False,
    )


@pytest.mark.parametrize(("rank", "ending"), [(None, "at exit\nfinalized"), ("0", "at exit\n")])
def test_a_process_of_torchrun_ends_without_finalization(rank, ending):
    """During which a thread of gloo that releases a tensor would abort it: 5 of 80 processes did (docs/log.md)."""
    job = (
        {}
        if rank is None
        else {"RANK": rank, "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    )
    done = ended(ENDING, job)
    assert (done.returncode, done.stdout) == (2, ending)
    assert "device=none" in done.stderr


FOLLOWS = """
import sys
from rehead import training
training.train = lambda options: iter([{"event": "end", "train_loss": 1.0}])
from rehead.cli import main
sys.argv[1:] = ["train", "trainer.parallel=ddp"]
sys.exit(main())
"""


def test_a_process_that_follows_the_first_one_ends_without_finalization_too():
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    code = ENDING.split("atexit.register")[0].replace("from rehead.cli import main\n", "") + FOLLOWS
    done = ended(code, job)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "given",
    [
        {"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "x", "MASTER_PORT": ""},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "tcp://10.0.0.5:23456"},
    ],
    ids=["empty", "a service of Kubernetes"],
)
def test_what_is_no_job_of_torchrun(given, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert of_torchrun() is None


def test_a_long_text_is_told_in_parts():
    """A store's value holds 8 MiB, a tokenizer of 151,000 tokens has more."""

    class Held(dict):
        def set(self, key, value):
            assert len(value.encode()) <= 8 * 2**20
            self[key] = value.encode()

        def get(self, key):
            return self[key]

        def check(self, keys):
            return keys[0] in self

    store, text = Held(), "a\u00e9\u4e2d\U0001f600" * 3_000_000
    tells = [object.__new__(Group) for _ in range(2)]
    for rank, one in enumerate(tells):
        one.rank, one._told, one._store = rank, 0, store
    for said in (text, "", "b"):
        assert tells[0].tell(said) == said
        assert tells[1].tell(None) == said


def test_a_process_waits_for_a_long_text_to_be_told():
    """Longer than its store waits."""
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    tells = [object.__new__(Group) for _ in range(2)]
    for rank, one in enumerate(tells):
        one.rank, one._told, one._store = rank, 0, store
    threading.Timer(0.3, tells[0].tell, ["late"]).start()
    assert tells[1].tell(None) == "late"


def test_batches_that_cannot_be_shared():
    done = subprocess.run(
        torchrun(2, "train", *changed("trainer.batch_size=3"), *MODELS["mha"], "trainer.parallel=ddp"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "trainer.batch_size=3 cannot be shared by 2 processes: use a multiple of 2." in done.stderr
    assert not Path("out/run/checkpoints").exists()


def test_one_process_imports_nothing_of_it():
    code = (
        "import sys; from rehead.cli.entry import main; "
        f"assert main(['train', *{[*changed('trainer.max_iters=1'), *MODELS['mha']]!r}]) == 0; "
        "assert not {'rehead.training.distributed', 'rehead.training.heartbeat'} & set(sys.modules)"
    )
    run(sys.executable, "-c", code)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_processes_save_beside_their_training(parallel):
    flags = [*RUN, *MODELS["gqa"], f"trainer.parallel={parallel}"]
    run(*torchrun(2, "train", *flags, "system.work_dir=one"))
    shown = run(*torchrun(2, "train", *flags, "trainer.save_async=True", "system.work_dir=two"))
    assert shown.count("saved step 10") == shown.count("saved step 20") == 1
    for step in (10, 20):
        assert equal(weights("one", step), weights("two", step))
        assert equal(moments("one", step), moments("two", step))


def test_only_the_first_process_reports():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = changed("trainer.max_iters=3", "trainer.sample_every=0", "trainer.report_to=tensorboard")
    run(*torchrun(2, "train", *flags, *MODELS["gqa"], "trainer.parallel=ddp", "system.work_dir=two"))
    assert len(list(Path("two/reports/tensorboard").iterdir())) == 1
    events = EventAccumulator("two/reports/tensorboard").Reload().Scalars("loss")
    assert [event.step for event in events] == [1, 2, 3]
    assert [event.value for event in events] == [pytest.approx(one["loss"], rel=1e-7) for one in steps("two")]
