"""DP-EBM on Adult: the boosted additive model of interpret, tuned as the methods of the bench are.

    pip install interpret-core==0.7.8
    python -m benchmarks.whole_data.boosted --folder DATA

H. Nori et al., "Accuracy, interpretability, and differential privacy via explainable boosting", ICML 2021.
Records, delta, the number of trials and the records that judge them are the bench's. The walk moves the
number of rounds and the learning rate. All settings else are the defaults. Bounds are those of the table that
the bench reads; categories are those that occur in the rows, as DP-EBM takes them. No seed is given, as
privacy asks, so no two runs are alike.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import equipoise.data
from benchmarks.trained_contenders import DELTA
from benchmarks.whole_data.cells import SEEDS, Point, walk
from benchmarks.whole_data.problems import PUBLIC, TUNING_SHARE
from equipoise.data.readers.schema import Category, Number, read_schema, table_of

ROUNDS, RATE = 300, 0.0025
"""A point of the walk is a multiple of each: its start, (1, 4), has the defaults 300 and 0.01."""


def main() -> None:
    import pandas
    from interpret.privacy import DPExplainableBoostingClassifier
    from sklearn.metrics import roc_auc_score

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("data"), help="that holds adult/adult.data.gz")
    folder = parser.parse_args().folder / "adult"

    adult = table_of(read_schema(Path(equipoise.data.__file__).with_name("adult.schema.toml")))
    used = adult.inputs
    kinds = ["continuous" if isinstance(column, Number) else "nominal" for column in used.values()]
    bounds = {}
    for place, column in enumerate(used.values()):
        if isinstance(column, Number):
            ends = torch.tensor([column.low, column.high], dtype=torch.float64)
            bounds[place] = tuple((ends.log1p() if column.log else ends).tolist())

    def read(name: str) -> tuple[pandas.DataFrame, pandas.Series]:
        names = list(adult.columns)
        rows = pandas.read_csv(folder / name, names=names, skipinitialspace=True, comment="|")
        for column_name, column in used.items():
            if isinstance(column, Number) and column.log:
                rows[column_name] = torch.tensor(rows[column_name].to_numpy()).double().log1p().numpy()
            elif isinstance(column, Category):
                rows[column_name] = rows[column_name].astype(str)
        return rows[list(used)], rows["income"].str.startswith(">")

    inputs, labels = read("adult.data.gz")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:-PUBLIC].numpy()
    private = inputs.iloc[order], labels.iloc[order]
    cut = round(TUNING_SHARE * len(order))
    tuning = [part.iloc[:cut] for part in private], [part.iloc[cut:] for part in private]

    def fit(epsilon: float, point: Point, train: list, judges: list) -> tuple[float, float]:
        """Accuracy and area under the curve, in percent."""
        model = DPExplainableBoostingClassifier(
            feature_types=kinds,
            privacy_bounds=bounds,
            max_rounds=round(ROUNDS * point[0]),
            learning_rate=RATE * point[1],
            epsilon=epsilon,
            delta=DELTA,
            n_jobs=1,
        )
        model.fit(*train)
        chance = model.predict_proba(judges[0])[:, 1]
        hits = ((chance > 0.5) == judges[1].to_numpy()).mean()
        return 100 * float(hits), 100 * float(roc_auc_score(judges[1], chance))

    print("| epsilon | settings | rounds, learning rate | accuracy | area under the curve | CPU s |")
    print("|---|---|---|---|---|---|")
    for epsilon in (1.0, 3.0, 8.0):
        chosen = walk(lambda point, seed, epsilon=epsilon: fit(epsilon, point, *tuning)[0])
        test = read("adult.test.gz")
        for name, point in (("default", (1.0, 4.0)), ("chosen", chosen)):
            began = time.process_time()
            found = [fit(epsilon, point, list(private), list(test)) for _ in SEEDS]
            seconds = (time.process_time() - began) / len(SEEDS)
            accuracies, areas = (sorted(values) for values in zip(*found, strict=True))
            spread = " | ".join(f"{v[2]:.2f} [{v[0]:.2f}, {v[-1]:.2f}]" for v in (accuracies, areas))
            where = f"{round(ROUNDS * point[0])}, {RATE * point[1]:g}"
            print(f"| {epsilon:g} | {name} | {where} | {spread} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
