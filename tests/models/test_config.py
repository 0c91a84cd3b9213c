"""Configs: a valid one runs, an invalid one raises ValueError with a remedy; never a bare torch error."""

import json
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitlab.layers.trace import Trace
from vitlab.models.config import option_paths
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig

REMEDIES = {
    "222 is not a multiple of 16: use 224 (or 208), or pad=True": dict(image_size=222),
    "50 is not a multiple of 16: use 64 (or 48), or pad=True": dict(image_size=(224, 50)),
    "use heads=12, or width=770": dict(width=768, heads=14),
    "expected learned | sincos | rotary | relative | none": dict(positions="fourier"),
    "Did you mean 'classes'": dict(clases=10),
    "Did you mean 'stochastic_depth'": dict(stochastic_dept=0.1),
    "use head_dim=24": dict(positions="rotary", head_dim=22),
    "a width that is a multiple of 4: use 152": dict(positions="sincos", width=150, heads=10),
    'without one use pooling="mean"': dict(class_token=False),
    'it needs pooling="class"': dict(distill_token=True, pooling="mean"),
    'use 16, or stem="patch"': dict(stem="conv", patch_size=28),
    'belong to stem="patch"': dict(stem="conv", patch_norms=True),
    "dropout=1.0 must be at least 0 and below 1": dict(dropout=1.0),
    "stochastic_depth=-0.1": dict(stochastic_depth=-0.1),
    "classes=-1 must be 0": dict(classes=-1),
    "depth=0 must be at least 1": dict(depth=0),
    "width=768.5 is not valid: expected a whole number": dict(width=768.5),
    "qkv_bias='yes' is not valid: expected True or False": dict(qkv_bias="yes"),
    "image_size=(224, 224, 3) is not valid: expected a whole number, or (height, width)": dict(
        image_size=(224, 224, 3)
    ),
    "expected relu | gelu | gelu_tanh | quick_gelu": dict(activation="swish"),
    'use positions="learned"': dict(positions="relative", patch_dropout=0.5),
}


@pytest.mark.parametrize(("remedy", "options"), REMEDIES.items())
def test_what_cannot_work_is_refused_with_a_remedy(remedy, options):
    with pytest.raises(ValueError) as error:
        ViTConfig().with_options(**options)
    assert remedy in str(error.value)


def test_options_are_found_by_their_own_name_by_group_and_by_path():
    by_name = ViTConfig().with_options(registers=4, positions="rotary", rotary_base=50, eps=1e-5, pooling="mean")
    by_group = ViTConfig().with_options(
        tokens={"registers": 4},
        positions={"kind": "rotary", "rotary_base": 50},
        norm={"eps": 1e-5},
        head={"pooling": "mean"},
    )
    by_path = ViTConfig().with_options(
        **{
            "tokens.registers": 4,
            "positions.kind": "rotary",
            "positions.rotary_base": 50,
            "norm.eps": 1e-5,
            "head.pooling": "mean",
        }
    )
    assert by_name == by_group == by_path


def test_json_round_trip_and_unknown_names():
    config = ViTConfig().with_options(image_size=(32, 48), patch_size=8, registers=2, positions="sincos", head_dim=7)
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    broken = config.to_dict()
    broken["tokens"]["registres"] = 1
    with pytest.raises(ValueError, match="Did you mean 'registers'"):
        ViTConfig.from_dict(broken)


def test_configs_cannot_be_changed_and_compare_by_value():
    with pytest.raises(AttributeError):
        ViTConfig().width = 3  # type: ignore[misc]
    assert ViTConfig() == ViTConfig(image_size=224)  # type: ignore[arg-type]


def test_every_option_has_one_name():
    assert len(option_paths(ViTConfig)) > 40


options = st.fixed_dictionaries(
    {
        "image_size": st.one_of(st.integers(-4, 40), st.tuples(st.integers(1, 40), st.integers(1, 40))),
        "patch_size": st.integers(0, 9),
        "channels": st.integers(0, 4),
        "classes": st.integers(-1, 5),
        "width": st.integers(0, 40),
        "depth": st.integers(0, 3),
        "heads": st.integers(0, 5),
    },
    optional={
        "head_dim": st.one_of(st.none(), st.integers(-1, 9)),
        "mlp_ratio": st.floats(0, 4),
        "mlp": st.sampled_from(["mlp", "swiglu"]),
        "stem": st.sampled_from(["patch", "conv"]),
        "pad": st.booleans(),
        "patch_bias": st.booleans(),
        "patch_norms": st.booleans(),
        "class_token": st.booleans(),
        "registers": st.integers(-1, 3),
        "distill_token": st.booleans(),
        "mask_token": st.booleans(),
        "positions": st.sampled_from(["learned", "sincos", "rotary", "relative", "none"]),
        "prefix_positions": st.sampled_from(["none", "class", "all"]),
        "norm": st.sampled_from(["pre", "post"]),
        "norm_pre": st.booleans(),
        "qkv_bias": st.booleans(),
        "qk_norm": st.booleans(),
        "attention": st.sampled_from(["auto", "fused", "explicit"]),
        "activation": st.sampled_from(["relu", "gelu", "gelu_tanh", "quick_gelu"]),
        "layer_scale": st.sampled_from([0.0, 0.1, -1.0]),
        "stochastic_depth": st.sampled_from([0.0, 0.3, 1.0]),
        "patch_dropout": st.sampled_from([0.0, 0.5]),
        "dropout": st.sampled_from([0.0, 0.2]),
        "pooling": st.sampled_from(["class", "mean", "mean_norm", "class_mean", "attention"]),
        "head_hidden": st.integers(-1, 6),
        "gradient_checkpointing": st.booleans(),
    },
)


def build_or_refuse(chosen) -> VisionTransformer | None:
    try:
        return VisionTransformer(ViTConfig().with_options(**chosen))
    except ValueError as error:
        words = set(re.findall(r"\w+", str(error)))
        assert words & {*chosen, "use", "must", "needs", "need", "expected"}, f"an error must say what to do: {error}"
        return None


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(chosen=options, training=st.booleans())
def test_a_valid_config_runs_and_an_invalid_one_is_refused_in_words(chosen, training):
    model = build_or_refuse(chosen)
    if model is None:
        return
    c = model.config
    out = model.train(training)(torch.randn(2, c.channels, *c.image_size))
    assert out.shape == (2, c.classes or model.feature_width)
    assert out.isfinite().all()
    assert ViTConfig.from_dict(json.loads(json.dumps(c.to_dict()))) == c


VALID = dict(patch_size=4, channels=2, width=24, depth=2, heads=3, classes=3)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    positions=st.sampled_from(["learned", "sincos", "rotary", "relative", "none"]),
    registers=st.integers(0, 2),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    size=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    pad=st.booleans(),
)
def test_any_image_either_runs_traced_as_untraced_or_is_refused_in_words(positions, registers, grid, size, pad):
    options = dict(VALID, positions=positions, registers=registers, pad=pad, image_size=(4 * grid[0], 4 * grid[1]))
    model = VisionTransformer(ViTConfig().with_options(**options)).eval()
    images = torch.randn(2, 2, *size)
    fits = all(n > 0 and (pad or n % 4 == 0) for n in size)
    if not fits:
        with pytest.raises(ValueError, match="is not a multiple of 4: use"):
            model(images)
        return
    trace = Trace("attention", "tokens")
    assert torch.equal(model(images), model(images, trace=trace))
    rows, columns = -(-size[0] // 4), -(-size[1] // 4)
    assert trace.layout.grid == (rows, columns)
    assert trace["attention", -1].shape[-1] == 1 + registers + rows * columns
