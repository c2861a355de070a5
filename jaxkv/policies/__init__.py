"""Policies: the parts, and the catalogue of named methods made of them."""

from jaxkv.policies.aggregate import Aggregate as Aggregate
from jaxkv.policies.allocate import Pyramid as Pyramid
from jaxkv.policies.allocate import Uniform as Uniform
from jaxkv.policies.catalogue import catalogue as catalogue
from jaxkv.policies.catalogue import policy as policy
from jaxkv.policies.observe import AllQueries as AllQueries
from jaxkv.policies.observe import CurrentQuery as CurrentQuery
from jaxkv.policies.observe import LastQueries as LastQueries
from jaxkv.policies.observe import NoQueries as NoQueries
from jaxkv.policies.observe import PseudoQueries as PseudoQueries
from jaxkv.policies.policy import Phase as Phase
from jaxkv.policies.policy import Policy as Policy
from jaxkv.policies.score import AccumulatedAttention as AccumulatedAttention
from jaxkv.policies.score import Attention as Attention
from jaxkv.policies.score import AttentionValue as AttentionValue
from jaxkv.policies.score import KeyNorm as KeyNorm
from jaxkv.policies.score import Recency as Recency
from jaxkv.policies.select import Select as Select
