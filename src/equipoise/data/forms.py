"""The declared columns of the named tables, from their published descriptions.

Adult: B. Becker, R. Kohavi, UCI Machine Learning Repository, 1996 (``adult.names``; the ranges of numbers are
those of
the questionnaire: ages from 17 to 90, up to 99 hours a week, gains top-coded at 99,999). Mushroom: UCI
Machine Learning Repository, 1987 (``agaricus-lepiota.names``).
"""

from __future__ import annotations

from equipoise.data.tables import Category, Label, Number, Skip, Table

__all__ = ["ADULT", "MUSHROOM"]


def _category(name: str, values: str) -> Category:
    return Category(name, tuple(values.split()), unknown="?")


ADULT = Table(
    (
        Number("age", 17, 90),
        _category(
            "workclass",
            "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
        ),
        Skip("fnlwgt"),
        _category(
            "education",
            "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters "
            "1st-4th 10th "
            "Doctorate 5th-6th Preschool",
        ),
        Number("education-num", 1, 16),
        _category(
            "marital-status",
            "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
            "Married-AF-spouse",
        ),
        _category(
            "occupation",
            "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
            "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv "
            "Armed-Forces",
        ),
        _category("relationship", "Wife Own-child Husband Not-in-family Other-relative Unmarried"),
        _category("race", "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
        _category("sex", "Female Male"),
        Number("capital-gain", 0, 99_999, log=True),
        Number("capital-loss", 0, 4_356, log=True),
        Number("hours-per-week", 1, 99),
        _category(
            "native-country",
            "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India "
            "Japan Greece South "
            "China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland "
            "France "
            "Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland "
            "Thailand Yugoslavia "
            "El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands",
        ),
        Label("income", ("<=50K", ">50K"), strip="."),
    ),
    comment="|",
)

_LETTERS = {
    "cap-shape": "bcxfks",
    "cap-surface": "fgys",
    "cap-color": "nbcgrpuewy",
    "bruises?": "tf",
    "odor": "alcyfmnps",
    "gill-attachment": "adfn",
    "gill-spacing": "cwd",
    "gill-size": "bn",
    "gill-color": "knbhgropuewy",
    "stalk-shape": "et",
    "stalk-root": "bcuezr",
    "stalk-surface-above-ring": "fyks",
    "stalk-surface-below-ring": "fyks",
    "stalk-color-above-ring": "nbcgopewy",
    "stalk-color-below-ring": "nbcgopewy",
    "veil-type": "pu",
    "veil-color": "nowy",
    "ring-number": "not",
    "ring-type": "ceflnpsz",
    "spore-print-color": "knbhrouwy",
    "population": "acnsvy",
    "habitat": "glmpuwd",
}

MUSHROOM = Table(
    (
        Label("class", ("e", "p")),
        *(Category(name, tuple(letters), unknown="?") for name, letters in _LETTERS.items()),
    )
)
