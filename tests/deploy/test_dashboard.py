"""The dashboard asks only for metrics and labels that nodes expose, as Prometheus names them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvstore.directory.statistics import Statistics
from kvstore.exposition import MetricsCollector
from kvstore.metrics import Metrics
from tests.deploy.compose import ROOT, composition

GRAFANA = ROOT / "deploy/grafana"
NAME = re.compile(r"\b(?:kvstore|process)_[a-z0-9_]+")
SELECTOR = re.compile(rf"({NAME.pattern})(?:\{{([^}}]*)\}})?")
OF_PROMETHEUS = {"node", "job", "instance", "le"}
OF_THE_PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}


def dashboard() -> dict[str, Any]:
    [path] = (GRAFANA / "dashboards").glob("*.json")
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def expressions() -> list[str]:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def names_of(family: Metric) -> list[str]:
    """What samples of a family are called."""
    if isinstance(family, CounterMetricFamily):
        return [f"{family.name}_total"]
    if isinstance(family, HistogramMetricFamily):
        return [f"{family.name}_{part}" for part in ("bucket", "sum", "count")]
    return [f"{family.name}_info" if family.type == "info" else family.name]


def exposed() -> dict[str, set[str]]:
    """The labels of every sample, by its name."""
    collector = MetricsCollector(Metrics(), {"node": "one"})
    collector.directory = Statistics()
    return {
        name: set(getattr(family, "_labelnames", ()))
        for family in collector.collect()
        for name in names_of(family)
    }


def test_names_are_as_prometheus_sees_them() -> None:
    found = exposed()
    assert found["kvstore_evictions_total"] == {"tier", "reason"}
    assert found["kvstore_match_seconds_bucket"] == set()
    assert found["kvstore_tier_used_bytes"] == {"tier"}
    assert "kvstore_node_info" in found


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_asks_for_what_is_there(expression: str) -> None:
    found = exposed()
    labels = set(OF_PROMETHEUS)
    used = SELECTOR.findall(expression)
    assert used
    for name, selector in used:
        assert name in found or name in OF_THE_PROCESS
        own = found.get(name, set())
        labels |= own
        selected = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert selected <= own | OF_PROMETHEUS
    for grouping in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in grouping.split(",")} <= labels
    assert expression.count("(") == expression.count(")")


def test_the_dashboard_shows_what_the_pool_is_judged_by() -> None:
    asked = " ".join(expressions())
    for name in (
        "kvstore_matched_blocks_total",
        "kvstore_tier_used_bytes",
        "kvstore_peer_bytes_total",
        "kvstore_directory_reach_seconds_bucket",
        "kvstore_directory_failures_total",
        "kvstore_evictions_total",
        "kvstore_put_blocks_total",
        "kvstore_sessions{",
        "0.99, sum by (node, le) (rate(kvstore_get_seconds_bucket",
    ):
        assert name in asked


def test_panels_have_a_place_and_name_the_labels_that_they_keep() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
        for target in panel.get("targets", ()):
            kept = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.search(r"by \(([^)]*)\)", target["expr"])
            assert kept <= set(re.split(r",\s*", grouped[1]) if grouped else ())


def test_grafana_is_told_of_its_source_and_of_the_dashboard() -> None:
    provisioning = GRAFANA / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    host, port = re.fullmatch(r"http://([\w-]+):(\d+)", source["url"]).groups()  # type: ignore[union-attr]
    services = composition()["services"]
    assert any(published.endswith(f":{port}") for published in services[host]["ports"])
    used = {panel["datasource"]["uid"] for panel in dashboard()["panels"] if panel["type"] != "row"}
    assert used == {source["uid"]}
    [provider] = yaml.safe_load((provisioning / "dashboards/kvstore.yml").read_text())["providers"]
    mounted = dict(volume.split(":")[1::-1] for volume in services["grafana"]["volumes"])
    assert mounted[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    assert mounted["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (GRAFANA / "dashboards" / home.name).is_file()
    assert str(home.parent) == provider["options"]["path"]
