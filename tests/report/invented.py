"""Results with invented numbers: only their shape matters to the pages."""

STATEMENT = {
    "guarantee": "proven",
    "epsilon": 0.9991,
    "epsilon_claimed": None,
    "delta": 1e-5,
    "relation": "add_or_remove_one",
    "warnings": [],
    "holes": [],
    "releases": [
        {"name": "gradient", "count": 40, "max_bound": 0.5, "mechanism": {"noise_multiplier": 3.25}}
    ],
}


def method(label: str, scores: list[float], **changes) -> dict:
    middle = sorted(scores)[len(scores) // 2]
    return {
        "label": label,
        "settings": {"data": "toy", "clip_norm": "1", "options": {}, "learning_rate": 0.5},
        "learning_rate": 0.5,
        "score": middle,
        "scores": scores,
        "sampling_error": 0.01,
        "judges": 500,
        "steps": 40,
        "curve": [[20, middle - 0.1, middle - 0.2, middle], [40, middle, min(scores), max(scores)]],
        "seconds": 4.0,
        "seconds_per_step": 0.1,
        "memory_bytes": 3 * 2**20,
        "statement": STATEMENT,
        "trials": [[0.5, 0.7], [2.0, 0.6]],
        **changes,
    }


def comparison() -> dict:
    """What `comparison.json` holds."""
    return {
        "data": "toy",
        "model": "mlp",
        "population": 10_000,
        "public_records": 100,
        "epsilon": 1.0,
        "delta": 1e-5,
        "score": "accuracy",
        "more_is_better": True,
        "baseline": 0.55,
        "baseline_answer": "always giving the commonest class",
        "seeds": 3,
        "trials": 2,
        "device": "CPU",
        "reproducible": False,
        "command": "equipoise compare --methods plain,better",
        "methods": [
            method("plain", [0.70, 0.71, 0.72]),
            method("better", [0.80, 0.81, 0.82], seconds_per_step=0.25, memory_bytes=6 * 2**20),
        ],
    }
