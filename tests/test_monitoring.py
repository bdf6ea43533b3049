"""examples/monitoring: its files fit each other, and Prometheus' own tool finds them
right. tests/engine/test_serve.py has them on a server."""

import json
import re
import shutil
from pathlib import Path

import yaml

from tests.prometheus import EXAMPLES, promtool

DASHBOARD = EXAMPLES / "grafana" / "dashboards" / "h2o.json"
RULES = yaml.safe_load((EXAMPLES / "rules.yml").read_text())


def queries() -> dict[str, str]:
    """Those of the dashboard, by panel and letter."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel["targets"]
    }


def test_promtool_finds_the_files_right():
    for arguments in (
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_test_of_the_rules_can_fail(tmp_path):
    for name in ("rules.yml", "rules_test.yml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    rules = tmp_path / "rules.yml"
    rules.write_text(rules.read_text().replace("> 0.5", "> 0.7"))
    done = promtool("test", "rules", "rules_test.yml", folder=tmp_path)
    assert done.returncode and "H2OPreemptionStorm" in done.stdout + done.stderr


def test_every_alert_is_tested():
    alerts = {r["alert"] for g in RULES["groups"] for r in g["rules"] if "alert" in r}
    tested = (EXAMPLES / "rules_test.yml").read_text()
    assert {name for name in alerts if f"alertname: {name}" not in tested} == set()
    assert len(alerts) == 6


def test_compose_starts_what_the_other_files_name():
    services = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
    assert set(services) == {"server", "prometheus", "grafana"}
    for service in services.values():
        for volume in service.get("volumes", ()):
            if volume.startswith("."):
                assert (EXAMPLES / volume.split(":")[0]).exists()
    config = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    (scraped,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert scraped == "server:8000" and "8000:8000" in services["server"]["ports"]
    source = EXAMPLES / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    assert "http://prometheus:9090" in source.read_text()


def test_the_dashboard_shows_every_metric_of_h2o():
    documented = (Path(EXAMPLES).parents[1] / "docs" / "metrics.md").read_text()
    names = set(re.findall(r"\| `(h2o_[a-z_]+)", documented))
    assert len(names) == 22
    shown = " ".join(queries().values())
    assert {name for name in names if name not in shown} == set()
