"""All dashboards, in the order of the README."""

from grafana.cost import COST
from grafana.data_plane import DATA_PLANE
from grafana.environments import ENVIRONMENTS
from grafana.inference import INFERENCE
from grafana.overview import OVERVIEW
from grafana.training import TRAINING

PAGES = (OVERVIEW, DATA_PLANE, TRAINING, INFERENCE, ENVIRONMENTS, COST)
