"""`equipoise compare` from words to files."""

from pathlib import Path


def test_compare_writes_a_page_and_answers_json(equipoise, tmp_path):
    line = "compare --methods dp-sgd,auto-s --epochs 1 --subset 600 --batch-size 300 --seeds 1 --trials 1"
    answer = equipoise(f"{line} --option auto-s.learning-rate=2 --json --run-dir", tmp_path)
    assert answer.code == 0
    assert [m["learning_rate"] for m in answer.value["methods"]] == [3.0, 2.0]
    page = Path(answer.value["page"]).read_text(encoding="utf-8")
    assert "2 methods on digits" in page
    assert "digits: 8 x 8 grey images of handwritten digits." in page
    assert str(tmp_path) not in page
    # a second call takes the runs from the folder and shows the table
    again = equipoise(f"{line} --option auto-s.learning-rate=2 --run-dir", tmp_path)
    assert "auto-s" in again.out
    assert "not accounted" in again.out


def test_compare_refuses_what_does_not_fit(equipoise, tmp_path):
    def err(words):
        answer = equipoise(f"compare --run-dir {tmp_path} {words}")
        assert answer.code == 2
        return answer.err

    assert "--learning-rates has 2 numbers" in err("--learning-rates 1,2")
    assert "numbers such as" in err("--learning-rates a,b,c")
    assert "METHOD.NAME=VALUE" in err("--option clip_norm=3")
    assert "--device 'cud' is no device" in err("--device cud")
    assert "--seeds is 0" in err("--seeds 0")
    assert "--learning-rates 1 is inf" in err("--learning-rates 1,inf,2")
    assert "--learning-rates 2 is 0" in err("--learning-rates 1,2,0")
    assert "--learning-rate is 'fast'" in err("--option dp-sgd.learning_rate=fast")
    assert not list(tmp_path.iterdir())
