"""Bounded sums, noise, sampling, releases, ledger, accounting: the one door out of the private side.

Rows computed from records are `PrivateRows`; their numbers are `Private`. `clip` and its kin make `Bounded`
sums, whose sensitivity is known; the `Ledger` adds noise to them, books the event in a write-ahead journal
and hands them out. What may be released is fixed beforehand in a `PrivacyPlan`, built from public constants
and calibrated to a `Budget`.
"""

from .accounting import EpsilonResult as EpsilonResult
from .accounting import epsilon as epsilon
from .accounting import gaussian_epsilon as gaussian_epsilon
from .accounting import gaussian_mu as gaussian_mu
from .accounting import quick_epsilon as quick_epsilon
from .bounded import Bounded as Bounded
from .bounded import merge as merge
from .bounded import sums_of as sums_of
from .calibration import Budget as Budget
from .calibration import calibrate as calibrate
from .calibration import calibrate_noise_multiplier as calibrate_noise_multiplier
from .clipping import ClipRule as ClipRule
from .clipping import clip as clip
from .clipping import clip_coordinates as clip_coordinates
from .clipping import clip_weighted as clip_weighted
from .clipping import unbounded_sum as unbounded_sum
from .correlated import CorrelatedNoise as CorrelatedNoise
from .correlated import clip_jointly as clip_jointly
from .correlated import radial_sensitivity as radial_sensitivity
from .counting import capped as capped
from .counting import centred_indicator as centred_indicator
from .counting import indicator as indicator
from .counting import soft_indicator as soft_indicator
from .diagnostics import Diagnostics as Diagnostics
from .diagnostics import load_private as load_private
from .diagnostics import save_private as save_private
from .digests import digest as digest
from .draws import Draw as Draw
from .errors import BudgetError as BudgetError
from .errors import ChangedQueryError as ChangedQueryError
from .errors import JournalError as JournalError
from .errors import LedgerError as LedgerError
from .errors import PlanError as PlanError
from .errors import PlanUsedUpError as PlanUsedUpError
from .journal import Journal as Journal
from .ledger import Ledger as Ledger
from .marks import mark as mark
from .marks import unmark as unmark
from .moments import moment_action as moment_action
from .moments import second_moment as second_moment
from .noise import Secrets as Secrets
from .noise import coin_generator as coin_generator
from .private import Private as Private
from .private import PrivateError as PrivateError
from .releases import PrivacyPlan as PrivacyPlan
from .releases import Release as Release
from .releases import Unproven as Unproven
from .replay import ReplayLedger as ReplayLedger
from .restatement import Finding as Finding
from .rows import PrivateRows as PrivateRows
from .sampling import FullBatch as FullBatch
from .sampling import Poisson as Poisson
from .sampling import Sampling as Sampling
from .sampling import Unamplified as Unamplified
from .sampling import WithoutReplacement as WithoutReplacement
from .search import PrivateSearch as PrivateSearch
from .selection import Selection as Selection
from .selection import clip_channels as clip_channels
from .selection import clip_either as clip_either
from .selection import clip_selected as clip_selected
from .selection import clip_unbounded as clip_unbounded
from .selection import top_k as top_k
from .selection import top_share as top_share
from .signatures import KeyFileError as KeyFileError
from .signatures import Signature as Signature
from .statement import Hole as Hole
from .statement import Statement as Statement
from .statement import statement_schema as statement_schema
