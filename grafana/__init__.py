"""Grafana dashboards as code: what is on them (`pages.PAGES`), and JSON made of it by grafana-foundation-sdk.

Nothing here is needed to run anything; `python -m grafana` writes `dashboards/*.json` and `README.md` anew.
"""
