"""A public server: what is served, what a browser may run, and that checkpoints bring no code along."""

import json
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from playwright.sync_api import Browser, expect

from app.log import scrub
from app.models import Models
from app.operator import Operator
from decoding.errors import DraftscopeError
from tests.app.asking import wait_until
from tests.app.conftest import DRAWN, Server, serve


@pytest.mark.parametrize(
    "path",
    [
        "gradio_api/file=app.py", "gradio_api/file=README.md", "gradio_api/file=../app.py", "gradio_api/file=/etc/passwd",
        "gradio_api/file=%2e%2e/app.py", "gradio_api/file=assets/../app.py", "gradio_api/file=.git/config", "app.py", "assets/style.css",
        "static/../../app.py", "theme.css/../app.py", "file=app.py", "gradio_api/file=link", ".env",
    ],
)  # fmt: skip
def test_only_intended_files_are_served(server: Server, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.endswith("link"):
        link = tmp_path / "link"
        link.symlink_to("/etc/passwd")
        path = f"gradio_api/file={link}"
    answer = httpx.get(server.url + path)
    assert answer.status_code in (403, 404, 405) and "root:" not in answer.text and "import" not in answer.text


def test_foreign_scripts_do_not_run(browser: Browser, server: Server) -> None:
    blocked: list[str] = []
    other = browser.new_page()
    other.on("console", lambda message: blocked.append(message.text) if message.type == "error" else None)
    other.goto(server.url)
    other.wait_for_selector(".ds-lane .ds-chip")
    other.evaluate(
        """() => { document.body.insertAdjacentHTML('beforeend', '<img src="x:" onerror="window.bad = 1"><svg onload="window.bad = 2">');
        const script = document.createElement('script'); script.textContent = 'window.bad = 3'; document.body.append(script);
        const far = document.createElement('script'); far.src = 'https://example.com/x.js'; document.body.append(far); }"""
    )
    other.wait_for_timeout(0)  # lets the messages in
    wait_until(lambda: other.evaluate("1") and len(blocked) >= 3)
    assert other.evaluate("window.bad") is None
    other.close()


def test_every_answer_carries_a_policy_and_the_nonce_is_new_each_time(server: Server) -> None:
    policies = [httpx.get(server.url).headers["content-security-policy"] for _ in range(2)]
    assert policies[0] != policies[1] and all("'unsafe-inline'" not in policy.split("style-src")[0] for policy in policies)
    health = httpx.get(server.url + "health")
    assert health.json()["status"] == "ok" and "sandbox" in health.headers["content-security-policy"]


def test_a_checkpoint_with_code_in_it_does_not_run(server: Server, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text((Path(server.models.extra_heads[0]) / "config.json").read_text())
    (head / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Bomb()}))
    torch.save({"fc.weight": Bomb()}, head / "pytorch_model.bin")
    models = Models(server.models.source, "cpu", "float32", (str(head),))
    with pytest.raises(DraftscopeError):
        models.head(str(head), models.target(server.models.source))
    assert not (tmp_path / "ran").exists()


def copied(server: Server, folder: Path) -> Path:
    return Path(shutil.copytree(server.models.source, folder / "target"))


def test_a_target_with_code_in_its_weights_does_not_run_it(server: Server, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    target = copied(server, tmp_path)
    for weights in target.glob("*.safetensors*"):
        weights.unlink()
    models = Models(server.models.source, "cpu", "float32")
    wanted = models.target(models.source).name
    for write in (
        lambda path: path.write_bytes(pickle.dumps({"model.norm.weight": Bomb()})),
        lambda path: torch.save({"model.norm.weight": Bomb()}, path),
    ):
        write(target / "pytorch_model.bin")
        with pytest.raises(DraftscopeError, match="can't be loaded"):
            models.target(str(target))
        assert not (tmp_path / "ran").exists() and models.target(models.source).name == wanted


@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json"])
def test_a_target_that_brings_code_of_its_own_does_not_run_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def asked(*_: object) -> str:
        pytest.fail("somebody is asked on the terminal whether to trust it")

    monkeypatch.setattr("builtins.input", asked)
    target = copied(server, tmp_path)
    ran = f"from pathlib import Path; Path({str(tmp_path / 'ran')!r}).touch()\nclass Own: pass\n"
    (target / "own.py").write_text(ran)
    told = json.loads((target / part).read_text())
    told["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
    told |= {"model_type": "of_its_own", "tokenizer_class": "Own"}
    (target / part).write_text(json.dumps(told))
    with suppress(DraftscopeError):  # refused, or loaded as the kind that transformers knows
        Models(str(target), "cpu", "float32").target(str(target))
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_too_large_is_refused_in_words(browser: Browser, server: Server) -> None:
    for other in serve(server.models, server.runs, Operator(max_upload_mb=1)):
        for size, status in ((1 << 20, 200), ((1 << 20) + 1, 413)):
            answer = httpx.post(other.url + "gradio_api/upload", files={"files": ("run.json", b"x" * size)}, timeout=60)
            assert answer.status_code == status
        assert answer.text == "File size exceeded maximum allowed size of 1048576 bytes."
        page = browser.new_page()
        page.goto(other.url)
        page.wait_for_function(DRAWN)
        page.get_by_role("tab", name="Runs").click()
        with page.expect_file_chooser() as waiting:
            page.click("#ds-upload")
        waiting.value.set_files({"name": "run.json", "mimeType": "application/json", "buffer": b"x" * (2 << 20)})
        expect(page.get_by_role("alert")).to_contain_text("run.json has 2 MB: this server takes files of 1 MB at most")
        expect(page.locator(".ds-lane")).to_have_count(3)
        page.close()


def test_no_token_of_the_hub_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-value")
    assert scrub("a hf_abcdefghij b secret-value c") == "a hf_*** b *** c"
