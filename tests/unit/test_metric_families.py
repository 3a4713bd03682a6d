"""Text of metrics with shared labels: Prometheus's parser reads what was written."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from service.telemetry.families import Family, Labels, text

_VALUES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r\x00"), max_size=12
)


def _read(*families: Family) -> dict[str, tuple[str, str, list[tuple[Mapping[str, str], float]]]]:
    read = text_string_to_metric_families(text(families).decode())
    return {
        each.name: (
            each.type,
            each.documentation,
            [(sample.labels, sample.value) for sample in each.samples],
        )
        for each in read
    }


@given(_VALUES, _VALUES, _VALUES, st.floats(allow_nan=False))
def test_labels_and_values_are_read_as_they_were_written(
    job: str, stage: str, kind: str, value: float
) -> None:
    family = Family("lag_seconds", "gauge", "Lag", "kind")
    for _ in range(2):
        family.add(Labels({"job": job, "stage": stage}), value, kind)
    series = {"job": job, "stage": stage, "kind": kind}
    assert _read(family)["lag_seconds"][2] == [(series, value)] * 2


def test_families_keep_their_help_and_kind() -> None:
    records = Family("records_total", "counter", "Records \\ so far\nof a stage")
    empty = Family("lag_seconds", "gauge", "Lag")
    records.add(Labels({"stage": "in"}), 10**12)
    assert _read(records, empty) == {
        "records": ("counter", "Records \\ so far\nof a stage", [({"stage": "in"}, 10**12)]),
        "lag_seconds": ("gauge", "Lag", []),
    }
