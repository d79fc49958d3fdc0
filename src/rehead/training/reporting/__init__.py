"""Where else a run's metrics go: TensorBoard, trackio, Weights & Biases."""

from rehead.training.reporting import tensorboard, trackio, wandb  # noqa: F401 (each enters its reporter)
from rehead.training.reporting.base import Reporter as Reporter
from rehead.training.reporting.base import Start as Start
from rehead.training.reporting.base import reporters as reporters
from rehead.training.reporting.reports import Reports as Reports
from rehead.training.reporting.reports import require_packages as require_packages
