"""Options that are algorithms: their names, how they are spelt, and what is said where one is wrong."""

from __future__ import annotations

import pytest
import torch

import equipoise as eq
from equipoise.methods import published
from equipoise.methods.base import Setting


def test_a_schedule_is_one_word():
    words = {"clip_norm": "decay:20:0.999", "anchor": "released", "anchor.scale": "line:1:61:3001"}
    made = eq.DPC4Plus.from_config({"name": "dp-c4-plus", "coupled.scale": "linear_decay:2:1:10", **words})
    assert made == eq.DPC4Plus(
        clip_norm=eq.methods.ExponentialDecay(20, 0.999),
        coupled=eq.methods.Distance(eq.methods.LinearDecay(2, final=1, steps=10)),
        anchor=eq.methods.ReleasedNorm(eq.methods.LinearDecay(1, final=61, steps=3001)),
    )
    assert eq.DPC4Plus.from_config(made.config()) == made


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"clip_norm": "decay:1:x"}, r"after the kind follow its numbers, clip_norm:rate:floor$"),
        ({"clip_norm": "line:1:2:3:4"}, r"^clip_norm=linear_decay:1:2:3:4: after the kind"),
        ({"clip_norm": "decay:1:2"}, r"^clip_norm\.rate=2 is outside"),
        ({"clip_rule": "psac", "clip_rule.regulariser": -1.0}, r"^clip_rule\.regulariser=-1\.0 must be"),
        ({"clip_norm": {"kind": "fixed", "clip_norm": 0.0}}, r"^clip_norm\.clip_norm=0\.0 must be"),
        ({"clip_rule": "psac", "clip_rule.gamma": 1.0}, r"^clip_rule\.gamma is unknown: PSAC has clip_rule"),
    ],
)
def test_what_is_wrong_inside_an_option_is_told_by_its_whole_name(words, message):
    with pytest.raises(ValueError, match=message):
        eq.DPSGD.from_config({"name": "dp-sgd", **words})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (eq.DPSGD, {"noise_multiplier": 0}),
        (eq.DPSGD, {"per_layer": True, "clip_norm": eq.methods.ReleasedQuantile()}),
        (eq.methods.Fixed, {"clip_norm": float("nan")}),
        (eq.methods.ReleasedQuantile, {"initial": 1.0, "maximum": 0.5}),
        (eq.methods.ExponentialDecay, {"rate": 1.5, "clip_norm": 1.0}),
        (eq.methods.LinearDecay, {"steps": 0, "clip_norm": 1.0, "final": 0.5}),
        (eq.methods.NoiseStages, {"factors": ()}),
        (eq.DCDPSGD, {"body_clip_norm": 2.0}),
        (eq.DCDPSGD, {"tail_fraction": 1.0}),
        (eq.DCDPSGD, {"tail_threshold": -1.0}),
        (eq.DCDPSGD, {"tail_threshold": 0.5, "variant": eq.methods.TopShare()}),
        (eq.methods.TwoChannel, {"tail_weight": 1.5}),
        (eq.methods.Trace, {"tail_index": 0.4}),
        (eq.methods.AdaptiveTail, {"count_noise": -0.1}),
        (eq.methods.DPZO, {"displacement": 0.0}),
        (eq.methods.Every, {"period": 2.5}),
        (eq.methods.NoiseFactor, {"factor": 0}),
        (eq.methods.DPSVRG, {"clip_norm": eq.methods.ReleasedQuantile()}),
        (eq.methods.ReleasedNorm, {"scale": eq.methods.ReleasedQuantile()}),
        (published.DPC4, {"anchor_scale": "decay"}),
        (eq.methods.Distance, {"scale": 0.0}),
        (eq.methods.ReleasedNorm, {"shrink_limit": 0.0}),
        (eq.methods.MeanSquareRule, {"tau": -1.0}),
        (eq.methods.MeanSquareRule, {"kappa": 0.4, "scale": "self"}),
        (eq.methods.MeanSquareRule, {"ema_beta": 1.0}),
        (eq.methods.Round, {"sampling_rate": 2.0}),
        (eq.AdaptiveRMS, {"radius_share": 1.0}),
        (eq.AdaptiveRMS, {"radius_noise_multiplier": 3.0}),
        (published.AdaptiveRMS, {"radius_sampling_rate": 2.0}),
        (eq.DiceSGD, {"residual_clip_norm": 0.5}),
        (eq.methods.Joint, {"noise_inflation": 0.9}),
        (eq.methods.Automatic, {"regulariser": -0.1}),
        (eq.methods.ErrorFeedback, {"rate": 0.0}),
        (eq.methods.DiSK, {"kappa": 1.1}),
        (eq.methods.LowPass, {"feedback": (-1.0,)}),
        (eq.methods.LowPass, {"forward": (1.0, -2.0), "feedback": ()}),
        (eq.methods.SecondMoment, {"decay": 1.0}),
        (eq.methods.AdaClip, {"floor": 0.0}),
        (eq.methods.DPAdamBC, {"beta2": -0.1}),
        (eq.methods.JointWhitening, {"share": 1.0}),
        (eq.methods.RandomSubspace, {"dimension": 0}),
        (eq.methods.MomentSubspace, {"share": 1.0}),
        (eq.methods.RandomSparsification, {"drop_rate": 1.0}),
        (eq.methods.PublicWarmStart, {"warm_scale": 0, "public": eq.methods.PublicRecords(torch.eye(3))}),
    ],
    ids=lambda part: getattr(part, "__name__", None) or ", ".join(part),
)
def test_settings_out_of_range_are_refused_by_name(kind, options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        kind(**options)


def test_a_plan_is_pure():
    """Plan twice, or again at a resume: the schedule of the same seed is the same, that of another is not."""
    method = eq.DPC4Plus(schedule=eq.methods.AtRandom(4), noise_multiplier=1.0, anchor_noise_multiplier=2.0)
    settings = [Setting(sampling=eq.Poisson(10, 100, 200), public_seed=seed) for seed in (5, 5, 6)]
    one, again, other = (method.plan(setting).constants.schedule for setting in settings)
    assert method.plan(settings[0]).constants.schedule == one == again != other


@pytest.mark.parametrize("word", ["top_share", "top-share", "Top-Share"])
def test_words_are_taken_however_they_are_spelt(word):
    made = eq.DCDPSGD.from_config({"name": "dc-dpsgd", "variant": word})
    assert made == eq.DCDPSGD(variant=eq.methods.TopShare())
    config = {"name": "dice-sgd", "recipe": "as-published", "variant": "algorithm-4"}
    assert eq.published.DiceSGD.from_config(config).variant == "algorithm_4"
