"""The Grafana dashboards as code: one module each, built into one JSON file each by `make dashboards`."""
