"""Sites and cells for predictions, and what is made of them."""

from dataclasses import asdict

from foretold import DECLARED, RECIPES, draw, picks, summarize


def test_a_seed_draws_the_same_sites_and_recipes_again() -> None:
    drawn = draw(3, 12, 5, ["cnn", "gpt2"])
    assert drawn == draw(3, 12, 5, ["cnn", "gpt2"]) != draw(4, 12, 5, ["cnn", "gpt2"])
    assert len({site for site, _ in drawn}) == 12
    assert all(len(set(recipes) & set(RECIPES)) == 5 for _, recipes in drawn)
    assert {site.hosts for site, _ in drawn if site.model == "gpt2"} == {4}


def _cell(off: float, **about: object) -> dict[str, object]:
    return {
        "predicted_ms": 100.0,
        "measured_ms": 100 / (1 + off),
        "low_ms": 1.0,
        "high_ms": 2.0,
        "planned_s": 9,
        **about,
    }


def test_a_summary_counts_what_is_near_and_what_is_far() -> None:
    said = summarize([_cell(0.05), _cell(-0.2), _cell(0.4), _cell(-0.2, low_ms=99.0, high_ms=101.0)])
    assert said["within_a_tenth_or_quartiles"] == 0.5
    assert said["over_30_percent_off"] == 1
    assert round(said["worst"]["off"], 6) == 0.4


def test_a_pick_is_held_against_the_best_by_measured_steps() -> None:
    site, recipes = DECLARED[0]
    step_ms = dict(zip(recipes, (100.0, 10.0, 20.0, 40.0, 50.0), strict=True))
    cells = [
        _cell(0, **asdict(site), recipe=recipe, pick=recipes[2]) | {"measured_ms": ms} for recipe, ms in step_ms.items()
    ]
    about = {"model": "cnn", "optimizer": "sgd", "accumulate": 1}
    steps = [{**about, "scheme": recipe, "steps": [100, None, 200]} for recipe in recipes]
    (found,) = picks(cells, steps)
    assert found["best"] == recipes[1]
    assert found["pick"] == recipes[2]
    assert found["seconds"][recipes[1]] == 2.0
    assert found["over_best"] == 1.0
    assert not list(picks(cells[1:], steps))  # not all were trained
