"""Train a model of your own with differential privacy on real data: scikit-learn's digits.

python examples/quickstart.py
"""

from torch import nn, optim
from torch.nn import functional as F

import equipoise as eq
from equipoise import data


def main() -> None:
    digits = data.load("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = optim.SGD(model.parameters(), lr=3.0, momentum=0.9)

    training = eq.PrivateTraining(
        model,
        optimizer,
        loss=lambda model, batch: F.cross_entropy(model(batch["input"]), batch["label"], reduction="none"),
        data=digits.train,
        sampling=eq.Poisson(expected_batch_size=700, population=digits.population, steps=80),
        method=eq.DPSGD(clip_norm=0.1),
        budget=eq.Budget(epsilon=3.0, delta=1e-5),
    )
    print(training.describe())

    images, labels = digits.test.fields["input"], digits.test.fields["label"]
    training.run(
        evaluate=lambda model: {"accuracy": (model(images).argmax(1) == labels).double().mean().item()}
    )
    accuracy = (model(images).argmax(1) == labels).double().mean().item()
    print(f"test accuracy {accuracy:.1%}")
    print(training.statement())


if __name__ == "__main__":
    main()
