from kvhold_client.aio import AsyncClient as AsyncClient
from kvhold_client.client import Client as Client
from kvhold_client.client import Pool as Pool
from kvhold_client.errors import KvholdError as KvholdError
from kvhold_client.errors import SessionFenced as SessionFenced
from kvhold_client.errors import Unreachable as Unreachable
from kvhold_client.hashing import PrefixHasher as PrefixHasher
from kvhold_client.hf_config import plan_request_from_hf_config as plan_request_from_hf_config
from kvhold_client.hf_config import read_hf_config as read_hf_config
from kvhold_client.local_daemon import LocalDaemon as LocalDaemon
from kvhold_client.models import model_plan_request as model_plan_request
from kvhold_client.plan import Plan as Plan
from kvhold_client.pools import PoolRequest as PoolRequest
from kvhold_client.results import ItemStatus as ItemStatus
from kvhold_client.results import PoolCounts as PoolCounts
from kvhold_client.sequence import Sequence as Sequence
from kvhold_client.sequence_table import SequenceTable as SequenceTable
from kvhold_client.session import Session as Session
from kvhold_client.step_outcome import StepOutcome as StepOutcome

__version__: str
