from duetime.bench.testbed import summed_up


def test_one_run_is_shown_as_it_is():
    assert summed_up([{"lost": 0, "p99_ms": 40}]) == {"lost": 0, "p99_ms": 40}


def test_of_several_runs_counts_are_added_and_measures_are_medians():
    runs = [{"lost": 1, "p99_ms": 40}, {"lost": 2, "p99_ms": 90}, {"lost": 0, "p99_ms": 30}]
    assert summed_up(runs) == {
        "lost": 3,
        "p99_ms": 40,
        "runs": 3,
        "spread": {"p99_ms": [30, 90]},
    }


def test_an_even_number_of_runs_has_its_median_between_two():
    assert summed_up([{"ratio": 0.5}, {"ratio": 0.8}])["ratio"] == 0.65


def test_a_missing_figure_is_left_out_of_the_median():
    runs = [{"p99_ms": None}, {"p99_ms": 7}]
    assert summed_up(runs)["p99_ms"] == 7
    assert summed_up([{"p99_ms": None}] * 2) == {"p99_ms": None, "runs": 2, "spread": {}}
