"""vitlab push against a stand-in of the hub on this machine: what arrives there loads again, with its model card.

huggingface_hub reads its environment when it is imported, so all pushes are made in one process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import vitlab
from vitlab.checkpoints.push import push
from vitlab.models.base import Card

RUNNER = """
import json, os, sys, time
import torch
import vitlab
from huggingface_hub import constants

sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.01))
for line in sys.stdin:
    call = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    if call["token"]:
        os.environ["HF_TOKEN"] = call["token"]
    constants.HF_HUB_OFFLINE = call["offline"]
    constants.ENDPOINT = call["endpoint"] or os.environ["HF_ENDPOINT"]
    import huggingface_hub.hf_api as hf_api
    hf_api.constants.ENDPOINT = constants.ENDPOINT
    try:
        pushed = vitlab.push(call["source"], call["name"], **call["options"])
        answer = vars(pushed)
        if call["load"]:
            model = vitlab.load("hf-hub:" + call["name"])
            with torch.inference_mode():
                answer["logits"] = model(torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)).tolist()
            answer["source"] = model.card.source
    except Exception as error:
        answer = dict(kind=type(error).__name__, error=str(error))
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    size = dict(image_size=16, patch_size=8, width=48, depth=2, heads=4, channels=3, classes=3)
    network = vitlab.create("vit_digits", **size).eval()
    network.labels = ["cat", "a|b", "<script>"]
    network.card = Card("vit_digits", "vitlab train photos", "Apache-2.0", {"test_top1": 0.9831932783, "seed": 0})
    return network


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    return vitlab.save(model, tmp_path_factory.mktemp("checkpoint") / "best")


@pytest.fixture(scope="module")
def run(hub, folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    hub.writers = {"hf_good": "me"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    ours = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    ours |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with subprocess.Popen([sys.executable, "-c", RUNNER], env={**kept, **ours}, **pipes) as process:

        def ask(name: str, *, token="hf_good", offline=False, endpoint="", load=False, **options) -> dict:
            call = dict(name=name, token=token, offline=offline, endpoint=endpoint, load=load, options=options)
            process.stdin.write(json.dumps({**call, "source": str(folder)}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def front_matter(card: str) -> dict:
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)


@pytest.mark.parametrize(("to", "weights"), {"native": "weights", "hf": "model", "timm": "model"}.items())
def test_what_is_pushed_loads_from_there(run, hub, model, to, weights):
    name = f"me/flowers-{to}"
    answer = run(name, to=to, load=True, message=f"as {to}")
    assert "error" not in answer, answer
    assert answer["uploaded"] and answer["url"] == f"{hub.endpoint}/{name}"
    with torch.inference_mode():
        here = model(torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16))
    torch.testing.assert_close(torch.tensor(answer["logits"]), here, rtol=0, atol=1e-6)
    stored = hub.repos[name].revisions["main"]
    assert stored.keys() == answer["files"].keys() >= {"README.md", f"{weights}.safetensors"}
    assert stored["README.md"].decode() == answer["card"]
    assert hub.repos[name].messages == [f"as {to}"] and not hub.repos[name].private


def test_a_foreign_model_of_the_hub_says_where_it_comes_from(run):
    assert run("me/source-hf", to="hf", load=True)["source"] == "hf-hub:me/source-hf"


def test_private_and_again(run, hub):
    assert "error" not in run("me/secret", private=True)
    assert hub.repos["me/secret"].private
    assert "error" not in run("me/secret", message="again")
    assert hub.repos["me/secret"].messages[1:] == ["again"] and hub.repos["me/secret"].private
    assert "error" not in run("me/open")
    refused = run("me/open", private=True)
    assert refused["kind"] == "UsageError" and "public" in refused["error"]


def test_a_readme_written_by_hand_is_kept(run, hub):
    assert "error" not in run("me/edited")
    stored = hub.repos["me/edited"].revisions["main"]
    stored["README.md"] = b"# My own words\n"
    answer = run("me/edited")
    assert stored["README.md"] == b"# My own words\n" and "README.md" not in answer["files"]
    assert any("by hand" in note for note in answer["notes"])


def test_two_layouts_in_one_repository_are_refused(run, hub):
    assert "error" not in run("me/mixed")
    refused = run("me/mixed", to="hf")
    assert refused["kind"] == "CheckpointError"
    assert "model.json, weights.safetensors" in refused["error"] and "another name" in refused["error"]
    assert "model.safetensors" not in hub.repos["me/mixed"].revisions["main"]


REFUSED = {
    "no token": (dict(name="me/x", token=""), "UsageError", ("no token", "hf auth login", "HF_TOKEN", "--dry-run")),
    "bad token": (dict(name="me/x", token="hf_bad"), "CheckpointError", ("does not accept the token", "hf auth")),
    "not yours": (dict(name="others/x"), "CheckpointError", ("write access to others",)),
    "no owner": (dict(name="flowers"), "UsageError", ("'flowers' is not", "OWNER/NAME", "me/flowers")),
    "three parts": (dict(name="a/b/c"), "UsageError", ("OWNER/NAME",)),
    "bad name": (dict(name="me/two--dashes"), "UsageError", ("not a name that the hub can have",)),
    "no network": (dict(name="me/x", endpoint="http://127.0.0.1:9"), "CheckpointError", ("cannot be reached", "again")),
    "offline": (dict(name="me/x", offline=True), "UsageError", ("Unset it", "--dry-run")),
    "layout": (dict(name="me/x", to="keras"), "UsageError", ("'keras'", "native, hf, timm, open_clip")),
    "one file": (dict(name="me/x", to="jax"), "UsageError", ("one file", "native, hf, timm, open_clip")),
    "other layout": (dict(name="me/x", to="open_clip"), "UsageError", ("is not written as open_clip",)),
}


@pytest.mark.parametrize(("call", "kind", "says"), REFUSED.values(), ids=REFUSED)
def test_what_goes_wrong_is_said_with_what_to_do(run, call, kind, says):
    refused = run(**call)
    assert refused.get("kind") == kind, refused
    for part in says:
        assert part in refused["error"]


# ------------------------------------------------------------------------------------------------------ the model card


def test_the_card_states_the_checkpoints_facts(model):
    pushed = push(model, "me/flowers", dry_run=True)
    assert not pushed.uploaded and set(pushed.files) == {"README.md", "model.json", "weights.safetensors"}
    head = front_matter(pushed.card)
    assert head["library_name"] == "vitlab" and head["pipeline_tag"] == "image-classification"
    assert head["license"] == "apache-2.0" and "base_model" not in head
    count = sum(p.numel() for p in model.parameters())
    for part in (
        f"| Parameters | {count:,} |",
        "| Input | 3 x 16 x 16 (channels, height, width) |",
        "stretched to 16x16",
        "| Classes | 3 |",
        "| Source | vitlab train photos |",
        r"| test\_top1 | 0.983193 |",
        r"cat, a\|b, &lt;script>",
        'vitlab.load("hf-hub:me/flowers")',
        "vitlab.predict(",
    ):
        assert part in pushed.card


@pytest.mark.parametrize(
    ("to", "says"),
    {
        "hf": "from transformers import ViTForImageClassification",
        "timm": 'timm.create_model("hf-hub:me/flowers", pretrained=True)',
    }.items(),
)
def test_the_card_says_how_another_library_loads_it(model, to, says):
    assert says in push(model, "me/flowers", to=to, dry_run=True).card


def test_a_licence_that_the_hub_does_not_know_is_other(model):
    before = model.card
    try:
        model.card = Card(source="hf-hub:facebook/dinov3-vits16-pretrain-lvd1689m", licence="DINOv3 License")
        head = front_matter(push(model, "me/x", dry_run=True).card)
        assert (head["license"], head["license_name"]) == ("other", "dinov3-license")
        assert head["base_model"] == "facebook/dinov3-vits16-pretrain-lvd1689m"
        model.card = None
        pushed = push(model, "me/x", dry_run=True)
        assert "license" not in front_matter(pushed.card) and "| Licence | not stated |" in pushed.card
        assert any("licence" in note for note in pushed.notes)
    finally:
        model.card = before


def test_a_clip_is_for_zero_shot_classification():
    card = push("bundled:clip", "me/clip", dry_run=True).card
    head = front_matter(card)
    assert head["pipeline_tag"] == "zero-shot-image-classification" and "vitlab.zero_shot(" in card
    assert head["tags"] == ["vitlab", "clip", "vision-transformer"]


def test_a_resnet_is_no_transformer():
    resnet = vitlab.create("resnet18", classes=0)
    head = front_matter(push(resnet, "me/resnet", to="hf", dry_run=True).card)
    assert head["tags"] == ["vitlab", "resnet"] and head["pipeline_tag"] == "image-feature-extraction"


def test_command(command, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    shown = command("push", str(folder), "me/flowers", "--dry-run").stdout
    assert "weights.safetensors" in shown and "# flowers" in shown and "nothing was sent" in shown
    values = json.loads(command("push", str(folder), "me/flowers", "--dry-run", "--json").stdout)
    assert values["uploaded"] is False and values["card"].startswith("---")
    assert "OWNER/NAME" in command("push", str(folder), "flowers", code=2).stderr
