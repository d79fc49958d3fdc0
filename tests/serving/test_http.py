"""The commands of docs/serving.md answer a real HTTP client with the text that rehead writes itself."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from rehead.cli import main

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]
PROMPTS = ["The ", "An assignment is", "for x in"]
GREEDY = {"temperature": 0, "max_tokens": 40}
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
BPE, CHARACTERS = ["bpe", "data.vocab_size=300"], ["char"]


@pytest.fixture(scope="module", params=[BPE, CHARACTERS], ids=["bpe", "char"])
def trained(request, tmp_path_factory):
    """A run, and what `rehead export` makes of it: DeepSeek's class."""
    folder = tmp_path_factory.mktemp(request.param[0])
    tokenizer, *flags = request.param
    run, mla = folder / "run", folder / "mla"
    flags += f"""data.name=python-docs data.tokenizer={tokenizer} data.block_size=64 system.work_dir={run}
        model.shape=llama model.rope=True model.n_layer=2 model.n_query_head=2 model.n_kv_head=1 model.head_dim=32
        model.n_embd=48 trainer.max_iters=100 trainer.batch_size=8 trainer.eval_batches=1
        trainer.sample_every=0 trainer.learning_rate=0.003""".split()
    assert main(["train", *flags]) == 0
    assert main(["export", str(run), str(mla), "--format", "deepseek_v3"]) == 0
    return run, mla


def written(run, prompts, capfd):
    """What `rehead generate` writes after each prompt."""
    capfd.readouterr()
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    length = ["--max-new-tokens", str(GREEDY["max_tokens"]), "--temperature", "0", "--json"]
    assert main(["generate", str(run), *flags, *length]) == 0
    return [result["completion"] for result in json.loads(capfd.readouterr().out)["results"]]


def documented(command, program, folder):
    """A command of docs/serving.md as words, with the program and the folder that are there."""
    lines = PAGE.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    (line,) = (line for line in lines if f"{command} " in line and "out/mla" in line)
    flags = shlex.split(line.partition(command)[2].replace("out/mla", shlex.quote(str(folder))))
    return [*program, *flags]


def client(address):
    return OpenAI(base_url=address, api_key="none", timeout=120, max_retries=0)


def test_transformers_serve(trained, serve, tmp_path, capfd):
    """Completions whole and in pieces; chats once the folder has a template, which a base model has not."""
    run, mla = trained
    folder = str(shutil.copytree(mla, tmp_path / "mla"))
    (tmp_path / "mla" / "chat_template.jinja").write_text(TEMPLATE)
    ours = written(run, [*PROMPTS, "What is it?\n"], capfd)
    assert len(set(ours)) > 1
    program = [Path(sys.executable).with_name("transformers"), "serve"]
    command = documented("transformers serve", program, folder)
    with serve(*command) as address, client(address) as theirs:
        for prompt, text in zip(PROMPTS, ours, strict=False):
            answer = theirs.completions.create(model=folder, prompt=prompt, **GREEDY)
            assert answer.choices[0].text == text
        pieces = theirs.completions.create(model=folder, prompt=PROMPTS[0], stream=True, **GREEDY)
        assert "".join(piece.choices[0].text for piece in pieces) == ours[0]
        message = {"role": "user", "content": "What is it?"}
        chat = theirs.chat.completions.create(model=folder, messages=[message], **GREEDY)
        assert chat.choices[0].message.content == ours[-1]


@pytest.mark.parametrize("trained", [CHARACTERS], ids=["char"], indirect=True)
def test_vllms_server(trained, serve, engines_python, capfd):
    run, mla = trained
    module = "vllm.entrypoints.openai.api_server"
    command = documented(module, [engines_python, "-m", module], mla)
    with serve(*command) as address, client(address) as theirs:
        answer = theirs.completions.create(model=str(mla), prompt=PROMPTS, **GREEDY)
    assert [choice.text for choice in answer.choices] == written(run, PROMPTS, capfd)
