"""What callers get wrong in Python is told in words: found, expected, and what to type."""

from __future__ import annotations

import io
import json
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.images.preprocess import Preprocess
from vitlab.layers.reducer import Reduction
from vitlab.layers.trace import Trace
from vitlab.models.config import FAMILIAR, option_paths
from vitlab.models.registry import FAMILIES
from vitlab.models.vit_config import ViTConfig

OWN_OPTIONS = {"embed_dim": {"clip", "clip_vision", "aimv2_lit", "eva02_clip", "pe_clip"}}  # theirs, and also ours
IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 24).reshape(2, 3, 16, 24)


def small(**options):
    size = dict(image_size=(16, 24), patch_size=8, width=48, depth=2, heads=4, channels=3, classes=5)
    return vitlab.create("vit_digits", **{**size, **options}).eval()


def refuses(says: str):
    return pytest.raises(ValueError, match=re.escape(says))


class TestImages:
    @pytest.mark.parametrize("images", [IMAGES.numpy(), IMAGES.tolist(), None], ids=["numpy", "list", "None"])
    def test_only_tensors(self, images):
        with refuses(f"images must be a tensor (batch, 3, height, width), not a {type(images).__name__}"):
            small()(images)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
    def test_the_dtype_is_the_models(self, dtype):
        with refuses(f"images are {dtype} but the model is torch.float32: pass images.to(torch.float32)"):
            small()(IMAGES.to(dtype))
        assert small().to(dtype)(IMAGES.to(dtype)).dtype == dtype

    def test_autocast_takes_either(self):
        model, images = small(), IMAGES.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(images), model(images.float()))


class TestTrace:
    @pytest.mark.parametrize("given", [-1, "0", "", None, [0.5], ["0"], 1.0], ids=repr)
    @pytest.mark.parametrize("name", ["layers", "heads"])
    def test_only_lists_of_numbers(self, name, given):
        with refuses(f'{name}={given!r} must be "all" or a list of {name[:-1]} numbers'):
            Trace("attention", **{name: given})

    def test_numbers_of_any_kind(self):
        trace = Trace("attention", layers=np.array([1]), heads=range(2))  # type: ignore[arg-type]
        small()(IMAGES, trace=trace)
        assert trace["attention", 1].shape == (2, 2, 7, 7)

    def test_intermediate_features_of_one_number(self):
        with refuses("layers=1 must be"):
            small().intermediate_features(IMAGES, 1)


class Drop:
    def __init__(self, count: int, needs: tuple[str, ...] = ()):
        self.count, self.needs = count, needs

    def removes(self, layer, depth, tokens, prefix):
        return self.count

    def reduce(self, tokens, remove, prefix, sizes, seen):
        assert set(seen) == set(self.needs)
        keep = tokens.shape[1] - remove
        places = torch.arange(tokens.shape[1])
        return Reduction(
            tokens[:, :keep], places.where(places < keep, -1).expand(tokens.shape[:2]), sizes[:, :keep], None
        )


class TestReducer:
    def test_class_attention_needs_a_class_token(self):
        assert small()(IMAGES, reducer=Drop(1, ("class_attention",))).shape == (2, 5)
        for path in ("auto", "explicit"):
            model = small(class_token=False, pooling="mean", attention=path)
            with refuses("Drop needs 'class_attention', which this model cannot give"):
                model(IMAGES, reducer=Drop(1, ("class_attention",)))

    @pytest.mark.parametrize("need", ["atention", "tokens", "patch_embed", "fc1"])
    def test_a_need_that_is_never_seen(self, need):
        with refuses(f"needs {need!r}"):
            small()(IMAGES, reducer=Drop(1, (need,)))

    @pytest.mark.parametrize("kind", ["qkv", "after_attention", "attention", "values"])
    def test_what_can_be_needed_is_seen(self, kind):
        small()(IMAGES, reducer=Drop(1, (kind,)))

    @pytest.mark.parametrize(("count", "layer", "left"), [(7, 0, 6), (-1, 0, 6), (4, 1, 2)])
    def test_more_tokens_than_there_are(self, count, layer, left):
        with refuses(f"removes {count} tokens at layer {layer}, where {left} patches are left"):
            small()(IMAGES, reducer=Drop(count))

    def test_all_patches_may_go(self):
        trace = Trace("tokens")
        small(depth=1)(IMAGES, reducer=Drop(6), trace=trace)
        assert trace["tokens", 0].shape[1] == 1


class TestPredict:
    def test_a_file_or_buffer_is_one_picture(self, tmp_path):
        model = small()
        noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "a.png")
        data = (tmp_path / "a.png").read_bytes()
        expected = vitlab.predict(model, tmp_path / "a.png")[0].scores
        with (tmp_path / "a.png").open("rb") as file:
            for source in (file, io.BytesIO(data), bytearray(data), memoryview(data), [io.BytesIO(data)]):
                found = vitlab.predict(model, source)
                assert [p.scores for p in found] == [expected]

    def test_an_empty_buffer_is_a_bad_picture_among_others(self):
        good = Image.new("RGB", (5, 5))
        found = vitlab.predict(small(), [good, io.BytesIO(b""), good])
        assert [p.error is None for p in found] == [True, False, True]

    def test_a_file_opened_as_text(self, tmp_path):
        (tmp_path / "a.txt").write_text("a\nb\n", encoding="utf-8")
        with (tmp_path / "a.txt").open(encoding="utf-8") as file, refuses("mode 'rb'"):
            vitlab.predict(small(), file)

    @pytest.mark.parametrize(
        "images", [None, 3, IMAGES, [IMAGES[0]], [None], [Image.new("L", (4, 4)), 7]], ids=lambda _: None
    )
    def test_what_is_no_picture(self, images):
        with refuses("an image is a path, bytes, an open file, an array (H, W, 3) or a PIL image, not a "):
            vitlab.predict(small(), images)

    def test_what_is_no_model(self):
        with refuses("runs/best: no such file or folder"):
            vitlab.predict("runs/best", "a.png")
        with refuses("found a NoneType"):
            vitlab.predict(None, "a.png")


@pytest.mark.parametrize("size", ["224", 22.4, (16.0, 24), (16,), (16, 24, 3), True, ("16", "24")], ids=repr)
def test_inspect_at_a_size_that_is_none(size):
    with refuses(f"image_size={size!r} must be"):
        vitlab.inspect("vit_tiny", image_size=size)


@pytest.mark.parametrize("batch", [0, -1, 1.5, "2", None, True], ids=repr)
def test_inspect_of_a_batch_that_is_none(batch):
    with refuses(f"batch={batch!r} must be"):
        vitlab.inspect("vit_tiny", batch=batch)


class TestConfig:
    @pytest.mark.parametrize(("theirs", "ours"), FAMILIAR.items())
    def test_names_of_other_libraries_lead_to_ours(self, theirs, ours):
        own = {name for name, (config, _) in FAMILIES.items() if theirs in option_paths(config)}
        assert own == OWN_OPTIONS.get(theirs, set())
        having = [config for name, (config, _) in FAMILIES.items() if name not in own and ours in option_paths(config)]
        assert having
        for config in having:
            with refuses(f"Did you mean '{ours}'?"):
                config().with_options(**{theirs: 1})

    @pytest.mark.parametrize(
        "options",
        [{"norm": 1e-5}, {"positions": None}, {"mlp": 4}, {"attention": {"kind": 1}}, {"stem": ["conv"]}],
        ids=str,
    )
    def test_a_group_is_called_by_its_name(self, options):
        (name,) = options
        with refuses(f"{name}=") as told:
            ViTConfig().with_options(**options)
        assert "kind" not in str(told.value) and " | " in str(told.value)

    def test_the_way_to_eps_is_told(self):
        with refuses("norm=1e-05 is not valid: expected pre | post. What else norm has is set by its own name: eps"):
            ViTConfig().with_options(norm=1e-5)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("name", ["eps", "layer_scale", "mlp_ratio", "rotary_base", "dropout", "stochastic_depth"])
    def test_numbers_are_finite(self, name, value):
        with refuses(f"{name}={value} is not valid: expected a finite number"):
            ViTConfig().with_options(**{name: value})

    def test_a_group_that_is_no_table(self):
        with refuses("Norm must be a table of options, not None"):
            ViTConfig.from_dict({**ViTConfig().to_dict(), "norm": None})


class TestPreprocess:
    @pytest.mark.parametrize(
        "values",
        [
            *(dict(size=size) for size in (None, "[32, 32]", 32.0, [32, 32.0], ["32", "32"], True, [True, 4], {})),
            *(dict(mean=mean) for mean in (None, 0.5, "abc", ["a", "b", "c"], [0.5, 0.5, None], [0.5, 0.5, math.nan])),
            *(dict(std=std) for std in (0.5, "abc", [math.inf] * 3, [True] * 3)),
            *(dict(resize=resize) for resize in ("256", 256.0, [256, "256"], True)),
            *(dict(scale=scale) for scale in (None, "1/255", math.nan, True, [1])),
            *(dict(interpolation=way) for way in (None, 3, ["bicubic"])),
            *(dict(how=how) for how in (None, 3, ["crop"])),
        ],
        ids=str,
    )
    def test_every_value_has_its_type(self, values):
        (name,) = values
        with refuses(f"{name}="):
            Preprocess.from_dict({"size": [32, 32], **values})

    @pytest.mark.parametrize("values", [None, [], "abc", {}, {"how": "crop"}], ids=repr)
    def test_a_table_with_a_size_is_needed(self, values):
        with refuses("preprocess must be a table with a size in it"):
            Preprocess.from_dict(values)

    def test_lists_and_whole_numbers_are_fine(self):
        found = Preprocess.from_dict(dict(size=[32, 48], mean=[0, 0, 0], std=[1, 1, 1], scale=1, resize=[40, 50]))
        assert found == Preprocess((32, 48), "stretch", (40, 50), "bilinear", (0.0,) * 3, (1.0,) * 3, 1.0)
        assert Preprocess.from_dict(json.loads(json.dumps(found.to_dict()))) == found
