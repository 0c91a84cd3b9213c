"""hf-hub:owner/name against a stand-in of the hub on this machine: nothing here leaves 127.0.0.1.

huggingface_hub reads its environment when it is imported, so every run is a process of its own. Four runs tell the
whole story: online, online again, with the server gone, and with HF_HUB_OFFLINE=1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report

RUNNER = """
import json, os, sys, time
import torch
from vitlab.checkpoints.load import load_with_report

def only_loopback(event, values):
    if event == "socket.connect" and isinstance(values[1], tuple) and values[1][0] not in ("127.0.0.1", "::1"):
        print("left this machine:", values[1], file=sys.stderr)
        os._exit(3)

def load(name):
    try:
        model, report = load_with_report(name)
        c = model.config
        images = torch.linspace(-1, 1, c.channels * c.image_size[0] * c.image_size[1])
        with torch.inference_mode():
            logits = model(images.reshape(1, c.channels, *c.image_size))
        return dict(logits=logits.tolist(), labels=model.labels)
    except Exception as error:
        return dict(kind=type(error).__name__, error=str(error))

sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.01))  # huggingface_hub waits for seconds before it tries again
sys.addaudithook(only_loopback)
for line in sys.stdin:
    asked = json.loads(line)
    assert "huggingface_hub" not in sys.modules  # each run imports it anew, with its own environment
    if os.fork() == 0:
        os.environ.update(asked["environment"])
        print(json.dumps({name: load(name) for name in asked["names"]}), flush=True)
        assert "torch._dynamo" not in sys.modules  # loading weights needs no compiler, and importing it takes seconds
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
MODELS = ("hf-hub:t/transformers", "hf-hub:t/timm", "hf-hub:t/native", "hf-hub:t/bin", "hf-hub:t/native@v1")
BROKEN_OFF, RESUMED = "hf-hub:t/reset", "hf-hub:t/large"
REFUSED = {
    "hf-hub:t/none": ("no such model", "hf auth login"),
    "hf-hub:t/native@v9": ("no revision 'v9'", "Leave @revision out"),
    "hf-hub:t/gated": ("is gated", "accept it at http://127.0.0.1:", "/t/gated (", "hf auth login", "HF_TOKEN"),
    "hf-hub:t/asks": ("is gated", "/t/asks (", "hf auth login"),  # 401: without any token
    "hf-hub:facebook/dinov3-vits16-pretrain-lvd1689m": ("is gated", "Without access: hf-hub:timm/vit_small_patch16"),
    "hf-hub:t/down": ("cannot be reached (Server error '503", "HF_ENDPOINT"),
    "hf-hub:t/portal": ("broke off", "Run it again"),  # a hotel's sign-in page instead of JSON
    "hf-hub:foo": ("expected hf-hub:owner/name", "@revision"),
    "hf-hub:": ("expected hf-hub:owner/name", "@revision"),
    "hf-hub:a/b/c": ("expected hf-hub:owner/name", "@revision"),
    "hf-hub:t/native@": ("expected hf-hub:owner/name", "@revision"),
    "hf-hub:t/two--dashes": ("not a name", "--"),
}


@pytest.fixture(scope="module")
def run(hub, tmp_path_factory):
    """run(names, VARIABLE=value) loads them in a process of their own; torch is imported once, before it splits."""
    cache = tmp_path_factory.mktemp("cache")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    ours = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "HF_HUB_ETAG_TIMEOUT": "5",
    }
    command = [sys.executable, "-c", RUNNER]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env={**kept, **ours}, **pipes) as process:

        def ask(names: list[str], **environment: str) -> dict[str, dict]:
            process.stdin.write(json.dumps({"names": names, "environment": environment}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        ask.cache = cache
        yield ask
        process.stdin.close()


def tiny(classes: int = 5, **options):
    size = dict(image_size=16, patch_size=8, width=48, depth=2, heads=4, channels=3)
    return vitlab.create("vit_digits", **{**size, "classes": classes, **options}).eval()


@pytest.fixture(scope="module")
def story(hub, run, tmp_path_factory):
    """Fill the hub, load in four processes, and keep what they said."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("repos")
    names = {0: "cat", 1: "dog", 2: "owl"}
    size = dict(image_size=16, patch_size=8, hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
    theirs = ViTConfig(**size, intermediate_size=96, id2label=names, label2id={v: k for k, v in names.items()})
    ViTForImageClassification(theirs).save_pretrained(root / "transformers")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(root / "transformers")
    (root / "transformers" / "tf_model.h5").write_bytes(b"of no use here")
    (root / "transformers" / "spiece.model").write_bytes(b"a tokenizer, as SigLIP has it")
    (root / "transformers" / "pytorch_model.bin").write_bytes(b"of no use beside model.safetensors")
    convert.write(tiny(), root / "timm", "timm")
    vitlab.save(tiny(), root / "native")
    vitlab.save(tiny(classes=7), root / "v1")
    vitlab.save(tiny(width=512, depth=1, mlp_ratio=4.0), root / "large")  # over 10 MB: huggingface_hub's chunk
    convert.write(tiny(), root / "bin", "hf")
    weights = root / "bin" / "model.safetensors"
    torch.save(load_file(weights), root / "bin" / "pytorch_model.bin")
    weights.unlink()
    for folder in root.iterdir():
        hub.add(f"t/{folder.name}", folder)
    hub.add("t/native", root / "v1", revision="v1")
    hub.add("t/reset", root / "native").breaks = [("weights.safetensors", "reset", 50_000)]
    hub.repos["t/large"].breaks = [("weights.safetensors", "close", 11_000_000)]
    errors = {"t/gated": (403, "GatedRepo"), "t/asks": (401, "GatedRepo"), "t/down": (503, ""), "t/portal": (200, "")}
    errors["facebook/dinov3-vits16-pretrain-lvd1689m"] = (401, "GatedRepo")
    for name, error in errors.items():
        hub.add(name, root / "native").error = error

    told = {"root": root, "cache": run.cache, "endpoint": hub.endpoint}
    told["online"] = run([*MODELS, RESUMED, BROKEN_OFF, *REFUSED])
    told["again"] = run([BROKEN_OFF])
    hub.close()
    told["gone"] = run([*MODELS, "hf-hub:t/never"])
    told["offline"] = run([*MODELS, "hf-hub:t/never"], HF_HUB_OFFLINE="1")
    return told


def logits_here(folder: Path):
    model, _ = load_with_report(folder)
    c = model.config
    images = torch.linspace(-1, 1, c.channels * c.image_size[0] * c.image_size[1])
    with torch.inference_mode():
        return model(images.reshape(1, c.channels, *c.image_size))


@pytest.mark.parametrize("when", ["online", "gone", "offline"])
@pytest.mark.parametrize("name", MODELS)
def test_loads_like_the_local_folder(story, name, when):
    """Also with the server gone and with HF_HUB_OFFLINE=1: then from the cache."""
    folder = "v1" if name.endswith("@v1") else name.rpartition("/")[2]
    found = story[when][name]
    assert "error" not in found, found["error"]
    torch.testing.assert_close(torch.tensor(found["logits"]), logits_here(story["root"] / folder), rtol=0, atol=1e-6)
    if folder == "transformers":
        assert found["labels"] == ["cat", "dog", "owl"]


def test_revisions_are_different_models(story):
    assert len(story["online"]["hf-hub:t/native"]["logits"][0]) == 5
    assert len(story["online"]["hf-hub:t/native@v1"]["logits"][0]) == 7


def test_fetches_only_what_loading_needs(story, hub):
    assert hub.fetched("t/transformers", "model.safetensors") == [None]  # once, and whole
    assert hub.fetched("t/transformers", "spiece.model") == [None]
    assert hub.fetched("t/transformers", "tf_model.h5") == []
    assert hub.fetched("t/transformers", "pytorch_model.bin") == []
    assert hub.fetched("t/bin", "pytorch_model.bin") == [None]


def test_a_download_that_breaks_off_goes_on_where_it_was(story, hub):
    assert "error" not in story["online"][RESUMED]
    first, second = hub.fetched("t/large", "weights.safetensors")
    assert first is None
    assert second == "bytes=10485760-"  # the chunks that had arrived were not fetched again
    assert cached(story, "large").read_bytes() == (story["root"] / "large" / "weights.safetensors").read_bytes()


def test_a_reset_connection_is_told_and_the_next_run_completes(story):
    first = story["online"][BROKEN_OFF]
    assert first["kind"] == "CheckpointError"
    assert f"{BROKEN_OFF}: the download from {story['endpoint']} broke off" in first["error"]
    assert "Run it again" in first["error"]
    assert "error" not in story["again"][BROKEN_OFF]
    assert cached(story, "reset").read_bytes() == (story["root"] / "native" / "weights.safetensors").read_bytes()
    assert not list(story["cache"].rglob("*.incomplete"))


def cached(story, name: str) -> Path:
    (found,) = (story["cache"] / "hub" / f"models--t--{name}" / "snapshots").glob("*/weights.safetensors")
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_hub_refuses_is_told_with_what_to_do(story, name):
    found = story["online"][name]
    assert found.get("kind") == "CheckpointError", found
    assert found["error"].startswith(f"{name}: ")
    for part in REFUSED[name]:
        assert part in found["error"]


def test_without_network_and_cache_says_what_to_do(story):
    found = story["gone"]["hf-hub:t/never"]
    assert found["kind"] == "CheckpointError"
    for part in (
        "not wholly in the local cache",
        story["endpoint"],
        "Connect to the network",
        "HF_ENDPOINT",
        "by its path",
    ):
        assert part in found["error"]


def test_offline_says_which_switch_it_is(story):
    found = story["offline"]["hf-hub:t/never"]
    assert found["kind"] == "CheckpointError"
    assert "Unset HF_HUB_OFFLINE" in found["error"]


def test_the_cached_folder_loads_by_its_path_elsewhere(story, tmp_path):
    """What the error says to do: copy the model's folder and load it by its path."""
    copy = shutil.copytree(cached(story, "reset").parent, tmp_path / "copy")
    assert torch.equal(logits_here(copy), logits_here(story["root"] / "native"))
