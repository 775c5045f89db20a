"""Grafana dashboards as code: `pages.PAGES` has the content, `render` makes Grafana's JSON with grafana-foundation-sdk.

Actors do not import this package. `python -m grafana` writes `dashboards/*.json` and `README.md`.
"""
