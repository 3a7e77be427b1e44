"""The shipped heads' own commands."""

import json
import shlex
from dataclasses import asdict
from types import SimpleNamespace

import pytest

import heads.cli
import heads.training.train as training
from heads.catalogue import SHIPPED

PLACES = sorted(folder.name for folder in SHIPPED.iterdir() if folder.is_dir())


def recipe_of(command: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The recipe that a command's training would have."""
    seen = []
    monkeypatch.setattr(heads.cli, "prepare", lambda arguments: None)
    monkeypatch.setattr(training, "train", lambda target, recipe, *rest, **options: seen.append(recipe) or SimpleNamespace())
    python, dash, package, *words = shlex.split(command)
    assert (python, dash, package) == ("python", "-m", "heads") and heads.cli.main(words) == 0
    return asdict(seen[0])


@pytest.mark.parametrize("name", PLACES)
def test_a_shipped_heads_command_trains_what_its_config_says(name, monkeypatch) -> None:
    """A default that changes must not change what the recorded commands do."""
    section = json.loads((SHIPPED / name / "config.json").read_text())["draftscope"]
    told = section["training"]
    stages = [told]
    while "stage_before" in stages[0]:
        stages.insert(0, stages[0]["stage_before"])
    commands = told["command"].split(" && ")
    assert len(commands) == len(stages) and section["method"] == name
    for command, stage in zip(commands, stages, strict=True):
        recipe = recipe_of(command, monkeypatch)
        assert recipe == {field: stage[field] for field in recipe}
        assert "assets/text" in command, "trained on text that is shipped too"
