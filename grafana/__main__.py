"""Write dashboards/*.json and README.md: `python -m grafana`."""

from pathlib import Path

from grafana.pages import PAGES
from grafana.readme import readme
from grafana.render import render

HERE = Path(__file__).parent

for page in PAGES:
    (HERE / "dashboards" / f"{page.uid}.json").write_text(render(page), encoding="utf-8")
(HERE / "README.md").write_text(readme(PAGES), encoding="utf-8")
