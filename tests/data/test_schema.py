"""Schemas of tables: what is declared, what is left to be filled in, and what no message shows."""

import json
import shutil
import tomllib
import warnings
from collections import Counter
from datetime import date

import pytest
import torch

from equipoise._files import schema_file
from equipoise.data.readers.files import DataFileError, MissingDataError
from equipoise.data.readers.first_schema import first_schema
from equipoise.data.readers.image_folders import load_images
from equipoise.data.readers.schema import (
    Date,
    SchemaError,
    load_table,
    read_schema,
    records_for_model,
    table_of,
)
from equipoise.data.records import Records

ROWS = """age,job,city,note,income
30,baker,Rome,7,low
?,smith,Oslo,8,high
50,pilot,Rome,9,low
41,baker,,,high
"""
SCHEMA = """
population = 4
target = "income"
missing = ["", "?"]
[columns.age]
type = "number"
low = 0
high = 100
[columns.job]
type = "category"
values = ["baker", "smith"]
other = true
[columns.city]
type = "category"
buckets = 3
[columns.note]
type = "skip"
[columns.income]
type = "category"
values = ["low", "high"]
"""


@pytest.fixture
def people(tmp_path):
    (tmp_path / "people.csv").write_text(ROWS)
    (tmp_path / "people.schema.toml").write_text(SCHEMA)
    return tmp_path / "people.csv"


def copied(people):
    """Equal rows in another file."""
    return shutil.copy(people, people.with_name("held_out.csv"))


def test_rows_by_a_schema(people):
    found = load_table(people, test=copied(people))
    assert (found.task, found.class_names, found.population) == ("classification", ("low", "high"), 4)
    numbers = found.train.fields["input"]
    assert found.numeric_columns == (0,)  # the place after it says that a number is missing
    assert numbers[:, :2].tolist() == [[pytest.approx(-0.4), 0], [0, 1], [0, 0], [pytest.approx(-0.18), 0]]
    assert numbers[:, 2:5].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]  # a pilot is another
    assert numbers[:, 5:].sum(1).tolist() == [1, 1, 1, 0]
    assert found.train.fields["label"].tolist() == [0, 1, 0, 1]


def test_a_range_that_cuts_public_rows_is_warned_of(people):
    test = people.with_name("public.csv")
    test.write_text(ROWS.replace("30,", "130,"))
    with pytest.warns(UserWarning, match=r"'age': 25% of the rows of 'public.csv' .*high = 100.* Widen"):
        load_table(people, test=test)
    people.write_text(ROWS.replace("30,", "130,") + ROWS.partition("\n")[2] * 9)
    test.write_text(ROWS)
    with warnings.catch_warnings(action="error"):  # of private rows nothing is said
        load_table(people, test=test)
    schema_file(people).write_text(SCHEMA.replace("other = true\n", "").replace("high = 100", "high = 40"))
    age, job = (rf"{column}: \d+% of the test rows of 'people.csv'" for column in ("'age'", "'job'"))
    with pytest.warns(UserWarning, match=age), pytest.warns(UserWarning, match=job):
        model = load_table(people, test_share=0.5)  # but of those that are set aside, and of those to predict
    with pytest.warns(UserWarning, match=r"'job': 25% of the rows of 'public.csv' are none of the declared"):
        records_for_model(test, model.schema)


def test_signs_of_no_answer_and_spellings_of_a_class_are_no_misfits(people):
    people.write_text(ROWS.replace("?", "999").replace("low", "low."))
    text = SCHEMA.replace('"?"]', '"999"]').replace('"high"]', '"high"]\nstrip = "."')
    schema_file(people).write_text(text)
    with warnings.catch_warnings(action="error"):
        load_table(people, test=copied(people))


def test_what_the_schema_says_of_a_column_moves_no_row(people):
    rows = [f"{i},{i},baker,Rome,7,low" for i in range(60)]
    people.write_text("\n".join(["id," + ROWS.splitlines()[0], *rows]))
    sides = []
    for old, new, high in (("high = 100", "high = 90", 90), ("buckets = 3", "buckets = 7", 100)):
        schema_file(people).write_text(SCHEMA.replace(old, new))
        with pytest.warns(UserWarning, match=r"not used, since the schema does not declare them: id\."):
            found = load_table(people, test_share=0.3)
        sides.append(((found.test.fields["input"][:, 0] + 1) / 2 * high).round().tolist())
    assert sides[0] == sides[1]


def test_the_configuration_of_a_run_holds_the_schema(people):
    before = load_table(people, test=copied(people))
    config = people.with_name("config.json")
    config.write_text(json.dumps({"schema": before.schema}))
    schema_file(people).unlink()
    found = load_table(people, config, test=copied(people), population=4)
    assert found.train.fingerprint() == before.train.fingerprint()
    config.write_text("{}")
    with pytest.raises(SchemaError, match=r"no config.json of a run on a table"):
        load_table(people, config, test=copied(people))


def test_a_target_chooses_the_task(people):
    note = 'type = "category"\nvalues = ["7", "8"]\nmissing = [""]'
    schema = people.with_name("other.toml")
    schema.write_text(SCHEMA.replace('missing = ["", "?"]\n', "").replace('type = "skip"', note))
    rows = ROWS.replace("?", "200").replace("9,low", "8,low")
    people.write_text(rows.replace("41,baker,,,high", "41,baker,Rome,8,high"))
    found = load_table(people, schema, target="age", test=copied(people))
    assert (found.task, found.num_classes, found.target_range) == ("regression", 1, (0.0, 100.0))
    assert found.train.fields["target"].tolist() == pytest.approx([-0.4, 1.0, 0.0, -0.18])
    found = load_table(people, schema, target="note, income", test=copied(people))
    assert (found.task, found.class_names) == ("multi-label", ("note", "income"))
    assert found.train.fields["target"].tolist() == [[0, 0], [1, 1], [1, 0], [1, 1]]


def test_what_is_described_is_left_to_be_filled_in(people):
    text, left = first_schema(people, target="income")
    ranges = ["low of 'age'", "high of 'age'", "low of 'note'", "high of 'note'"]
    assert left == ["population", *ranges, "values of 'income'"]
    values = tomllib.loads(text)
    assert list(values["columns"]) == ["age", "job", "city", "note", "income"]
    signs = ["", "?", "NA", "N/A", "n/a", "nan", "null"]
    assert values["columns"]["job"] == {"type": "category", "buckets": 16, "missing": signs}
    assert "missing" not in values.keys() | values["columns"]["income"].keys()
    for cell in ("30", "41", "50", "baker", "smith", "Rome", "Oslo"):
        assert cell not in text, cell
    ids = people.with_name("ids.csv")
    ids.write_text(ROWS.replace("Rome,9", "Bern,9").replace("baker,,", "baker,Oulu,"))
    assert tomllib.loads(first_schema(ids)[0])["columns"]["city"] == {"type": "skip"}
    notes = people.with_name("notes.csv")
    seen = "seen on the ward on day {},no\n"
    for days in (2, 31):
        notes.write_text("note,y\n" + "".join(seen.format(day % days) for day in range(100)))
        assert tomllib.loads(first_schema(notes, target="y")[0])["columns"]["note"] == {"type": "skip"}
    path = people.with_name("new.toml")
    path.write_text(text)
    with pytest.raises(SchemaError, match=r"to be filled in: population, low of 'age'.*no epsilon"):
        table_of(read_schema(path))
    with pytest.raises(SchemaError, match=r"to be filled in: low of 'age'"):
        table_of(read_schema(path, population=7))


def test_public_rows_fill_in_ranges_and_categories(people):
    public = people.with_name("public.csv")
    public.write_text("age,job,city,note,income\n20,baker,Rome,1,low\n80,?,Bern,5,high\n")
    text, left = first_schema(people, target="income", public_rows=public)
    columns = tomllib.loads(text)["columns"]
    assert left == ["population"]
    assert (columns["age"]["low"], columns["age"]["high"]) == (20, 80)
    assert columns["job"]["values"] == ["baker"]
    assert {name: column.get("missing") for name, column in columns.items()} == {
        "age": None, "job": ["?"], "city": None, "note": None, "income": None,
    }  # fmt: skip
    assert columns["income"]["values"] == ["high", "low"]
    with pytest.raises(SchemaError, match="names the private rows themselves"):
        first_schema(people, public_rows=people)


def test_private_rows_are_no_test_rows(people, tmp_path):
    link = tmp_path / "link.csv"
    link.symlink_to(people)
    for test in (people, str(people), link):
        with pytest.raises(DataFileError, match="holds private records of --data"):
            load_table(people, schema_file(people), test=test)
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
    for test in (tmp_path / "photos", tmp_path / "photos" / "a"):
        with pytest.raises(DataFileError, match="holds private records of --data"):
            load_images(tmp_path / "photos", "8x8", test=test, population=9)


def test_a_target_that_is_no_name_shows_no_row(tmp_path):
    path = tmp_path / "bare.csv"
    path.write_text("alice,secretary,yes\nbob,baker,no\n")
    with pytest.raises(SchemaError, match=r"--target names income.*--no-header") as error:
        first_schema(path, target="income")
    assert "secretary" not in str(error.value)
    path.write_text("name,job,incomes\nbob,baker,no\n")
    with pytest.raises(SchemaError, match="Did you mean incomes"):
        first_schema(path, target="income")


def test_a_date_is_one_column_of_parts(tmp_path):
    """By hand for days of a leap year, beyond the range and missing; no row is longer than 1."""
    parts = ["days", "year", "month", "weekday"]
    range_ = {"low": "2020-02-28", "high": "2024-02-29"}
    one = Date(type="date", **range_, format="%d.%m.%Y", parts=parts, missing=["?"])
    names = [name for name, *_ in one.codes()]
    days = (date(2024, 2, 29) - date(2020, 2, 28)).days
    for cell, day, inside in (
        ("29.02.2020", date(2020, 2, 29), date(2020, 2, 29)),
        ("31.12.2023", date(2023, 12, 31), date(2023, 12, 31)),
        ("02.05.2031", date(2031, 5, 2), date(2024, 2, 29)),
    ):
        wanted = dict.fromkeys(names, 0.0)
        wanted["days since 2020-02-28"] = (inside - date(2020, 2, 28)).days / days * 2 - 1
        wanted["year"] = (inside.year - 2022) / 2
        ones = {f"month {day.month}", f"weekday {day.isoweekday()}"}  # of January and Monday there are none
        wanted |= dict.fromkeys(ones & wanted.keys(), 1.0)
        found = one.encode(cell)
        assert found == pytest.approx([*(value / 2 for value in wanted.values()), 0.0])
        assert sum(number**2 for number in found) <= 1 + 1e-9
    assert one.encode("?") == [0.0] * 19 + [1.0]
    with pytest.raises(ValueError, match="no date of the form") as error:
        one.encode("1988-03-17")
    assert "1988" not in str(error.value)
    path = tmp_path / "t.csv"
    path.write_text("visit,y\n2024-03-01,1\n,2\n2024-03-02,3\n")
    assert tomllib.loads(first_schema(path, target="y")[0])["columns"]["visit"] == {
        "type": "date", "low": "FILL IN", "high": "FILL IN", "parts": ["days", "month", "weekday"],
        "missing": ["", "?", "NA", "N/A", "n/a", "nan", "null"],
    }  # fmt: skip


def test_a_first_row_of_data_is_no_header_and_is_not_shown(tmp_path):
    path = tmp_path / "bare.csv"
    path.write_text("61,secretary,yes\n30,baker,no\n")
    with pytest.raises(DataFileError, match="--no-header") as error:
        first_schema(path)
    assert "secretary" not in str(error.value)
    text, _ = first_schema(path, header=False)
    assert list(tomllib.loads(text)["columns"]) == ["column-1", "column-2", "column-3"]
    assert tomllib.loads(text)["header"] is False


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (",a,b\n4,1,2\n2,3,4\n", ["column-1", "a", "b"]),
        (",job,buys\n0,baker,yes\n1,smith,no\n2,pilot,no\n", ["column-1", "job", "buys"]),
        ('"","job"\n"1","baker"\n"2","smith"\n"3","pilot"\n', ["column-1", "job"]),
        ("age,2023,nan\n30,1,2\n?,3,4\n", ["age", "2023", "nan"]),
        ("land,2022\nItaly,1\nSpain,2\n", None),
        ("1,61,baker\n2,30,smith\n3,40,pilot\n", None),
        (",secretary,yes\n61,baker,no\n", None),
        ("?,secretary,yes\n61,baker,no\n", None),
        ("2021,2022\n1,2\n", None),
    ],
)
def test_numbers_and_blanks_are_names_where_the_rest_speaks_for_a_header(tmp_path, rows, names):
    path = tmp_path / "t.csv"
    path.write_text(rows)
    if names is None:
        with pytest.raises(DataFileError, match="--no-header if it is, or --header"):
            first_schema(path)
        names = [name or "column-1" for name in rows.splitlines()[0].split(",")]
        assert list(tomllib.loads(first_schema(path, header=True)[0])["columns"]) == names
    else:
        assert list(tomllib.loads(first_schema(path)[0])["columns"]) == names


def test_a_number_of_the_row_is_no_input(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(",a\n" + "".join(f"{i},{i * i % 7}\n" for i in range(9)))
    kinds = {name: part["type"] for name, part in tomllib.loads(first_schema(path)[0])["columns"].items()}
    assert kinds == {"column-1": "skip", "a": "number"}


@pytest.mark.parametrize("names", [["", "age"], ["5", "age"], ["age", "age"]])
def test_the_names_of_parquet_are_no_row(tmp_path, names):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = [pyarrow.array(["a", "b"])] * 2
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=names), tmp_path / "t.parquet")
    if names[0] == names[1]:
        with pytest.raises(DataFileError, match="two columns have the same name") as error:
            first_schema(tmp_path / "t.parquet")
        assert "--no-header" not in str(error.value)
    else:
        found = list(tomllib.loads(first_schema(tmp_path / "t.parquet")[0])["columns"])
        assert found == [names[0] or "column-1", "age"]


def test_remarks_and_numbers_with_commas_are_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("# of 2024; by hand\nage;wage;name\n30;1,5;a,b\n41;2;7,5\n")
    with pytest.raises(DataFileError, match="comment = "):
        first_schema(path, delimiter=";")
    with pytest.warns(UserWarning, match=r"written with a comma: wage\. .*points"):
        text, _ = first_schema(path, delimiter=";", comment="#")
    values = tomllib.loads(text)
    assert (values["comment"], list(values["columns"])) == ("#", ["age", "wage", "name"])


AGE, NOTE, INCOME = 'type = "number"', 'type = "skip"', 'target = "income"'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("low = 0", "lo = 0", "no key 'lo'. Did you mean low?"),
        ("low = 0", 'low = "x"', "column 'age': low = 'x'. Input should be a valid number"),
        ("low = 0", "low = 100", "must be finite and not empty"),
        ("low = 0\n", "", "column 'age': low. Field required"),
        (AGE, 'type = "day"', "there are number, category, date, weight, text, skip"),
        (AGE, 'type = ["number"]', "there are number, category, date, weight, text, skip"),
        (f"{AGE}\nlow = 0", 'type = "date"\nlow = "2020-01-01"', "column 'age': high = 100"),
        ("population = 4", "", "population is missing"),
        ("population = 4", "population =", "is no TOML"),
        ("population = 4", "x = " + "[" * 9000, "is no TOML"),
        ("population = 4", "population = " + "1" * 5000, "is no TOML"),
        (INCOME, "", "target is missing"),
        (INCOME, 'target = "incom"', "Did you mean income?"),
        (INCOME, 'target = "city"', "must be a category with values"),
        (INCOME, 'target = ["income", "age"]', "two values each"),
        (INCOME, 'target = ["income", "income"]', "named twice"),
        ("buckets = 3", "", "either values or buckets"),
        ("buckets = 3", "buckets = 99999999999", "less than or equal to 65536"),
        ("high = 100", f"high = {10**400}", "column 'age': high = 10.*valid number"),
        (NOTE, 'type = "text"\nvocabulary = 1000000000000', "vocabulary = 1000000000000.*less than or equal"),
        (NOTE, f"{NOTE}\nlow = 1", "column 'note': there is no key 'low'"),
        ("[columns.age]", "log = 1\n[columns.age]", "no key 'log'"),
        ('["low", "high"]', '["FILL IN", "low", "high"]', "filled in: values of 'income'"),
        ('["baker", "smith"]', '["baker", " smith"]', "no cell is ' smith'"),
        ('["", "?"]', '["", "baker"]', "'baker' is a value of column 'job' and a sign for a missing one"),
    ],
)
def test_schemas_that_cannot_be_used(people, old, new, message):
    assert old in SCHEMA
    schema_file(people).write_text(SCHEMA.replace(old, new))
    with pytest.raises(SchemaError, match=message):
        load_table(people, test=copied(people))


def test_what_is_missing_is_named(people):
    with pytest.raises(DataFileError, match="--test-share"):
        load_table(people)
    with pytest.raises(MissingDataError, match="schema init"):
        load_table(people, "absent.toml", test=copied(people))
    people.write_text(ROWS.replace("age", "Age", 1))
    with pytest.raises(DataFileError, match=r"lacks the declared columns 'age'. The file has 'Age'"):
        load_table(people, test_share=0.5)
    people.write_text(ROWS.replace("50,pilot", "fifty,pilot") + 2 * "fifty,pilot,Rome,9,low\n")
    with pytest.raises(DataFileError, match=r"line 4, column 'age': .* do not fit: 3") as error:
        load_table(people, test=copied(people))
    assert "fifty" not in str(error.value)


def test_rows_without_the_target_are_records_for_a_model(people):
    schema = dict(load_table(people, test=copied(people)).schema)
    whole, labelled = records_for_model(people, schema)
    assert labelled
    bare = people.with_name("new.csv")
    bare.write_text("\n".join(line.rpartition(",")[0] for line in ROWS.splitlines()))
    found, labelled = records_for_model(bare, schema)
    assert not labelled
    assert torch.equal(found.test.fields["input"], whole.test.fields["input"])
    schema["header"] = False
    for path in (people, bare):
        path.write_text("\n".join(path.read_text().splitlines()[1:]))
        found, labelled = records_for_model(path, schema)
        assert (labelled, len(found.test)) == (path == people, 4)
        assert torch.equal(found.test.fields["input"], whole.test.fields["input"])


def test_one_record_more_moves_no_other_one_between_the_parts():
    """Also where some are equal: the parts of neighbouring sets differ by that record only."""

    def parts_of(rows):
        parts = Records({"input": rows}).set_aside(0.3, seed=1)
        return [Counter(part.fields["input"].flatten().tolist()) for part in parts]

    numbers = torch.randint(0, 40, (200, 1)).float()
    for i in (0, 17, 199):
        rest = parts_of(torch.cat([numbers[:i], numbers[i + 1 :]]))
        both = list(zip(parts_of(numbers), rest, strict=True))
        assert sum(((one - other) + (other - one)).total() for one, other in both) == 1


def test_the_rest_of_the_rows_is_a_share_of_the_stated_population(people):
    """How many of them were set aside is private."""
    people.write_text(ROWS + ROWS.partition("\n")[2] * 9)
    found = load_table(people, test_share=0.5, population=1000)
    assert found.population == 500
    assert len(found.train) + len(found.test) == 40
