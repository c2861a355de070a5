"""What compression costs on text: tasks, fidelity, runs, reports."""

from jaxkv.evaluation.example import Example as Example
from jaxkv.evaluation.example import Question as Question
from jaxkv.evaluation.fidelity import Fidelity as Fidelity
from jaxkv.evaluation.fidelity import fidelity as fidelity
from jaxkv.evaluation.fidelity import reference as reference
from jaxkv.evaluation.forced import follow as follow
from jaxkv.evaluation.retention import Retention as Retention
from jaxkv.evaluation.retention import retained as retained
from jaxkv.evaluation.runner import check_data as check_data
from jaxkv.evaluation.runner import cost as cost
from jaxkv.evaluation.runner import evaluate as evaluate
from jaxkv.evaluation.scorers import SCORERS as SCORERS
from jaxkv.evaluation.scorers import score as score
from jaxkv.evaluation.settings import Settings as Settings
from jaxkv.evaluation.settings import Tasks as Tasks
from jaxkv.evaluation.settings import changed as changed
from jaxkv.evaluation.settings import load as load
from jaxkv.evaluation.tasks import TASKS as TASKS
