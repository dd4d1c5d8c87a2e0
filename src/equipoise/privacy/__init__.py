"""Bounded sums, noise, sampling, releases, ledger, accounting: the one door out of the private side.

Rows computed from records are `PrivateRows`; their numbers are `Private`. `clip` and its kin make `Bounded`
sums, whose sensitivity is known. The `Ledger` adds noise to them, books the event in a write-ahead journal
and hands them out. What may be released is fixed beforehand in a `PrivacyPlan`, built from public constants
and calibrated to a `Budget`.
"""

from equipoise.privacy.accounting.calibrate import Budget as Budget
from equipoise.privacy.accounting.calibrate import calibrate as calibrate
from equipoise.privacy.accounting.calibrate import calibrate_noise_multiplier as calibrate_noise_multiplier
from equipoise.privacy.accounting.calibrate import calibrate_steps as calibrate_steps
from equipoise.privacy.accounting.epsilon import EpsilonResult as EpsilonResult
from equipoise.privacy.accounting.epsilon import epsilon as epsilon
from equipoise.privacy.accounting.epsilon import gaussian_epsilon as gaussian_epsilon
from equipoise.privacy.accounting.epsilon import gaussian_mu as gaussian_mu
from equipoise.privacy.accounting.private_search import PrivateSearch as PrivateSearch
from equipoise.privacy.bounds.bounded import Bounded as Bounded
from equipoise.privacy.bounds.bounded import sums_of as sums_of
from equipoise.privacy.bounds.clipping import WeightRule as WeightRule
from equipoise.privacy.bounds.clipping import clip as clip
from equipoise.privacy.bounds.clipping import clip_coordinates as clip_coordinates
from equipoise.privacy.bounds.clipping import unbounded_sum as unbounded_sum
from equipoise.privacy.bounds.counts import capped as capped
from equipoise.privacy.bounds.counts import centred_indicator as centred_indicator
from equipoise.privacy.bounds.counts import indicator as indicator
from equipoise.privacy.bounds.counts import soft_indicator as soft_indicator
from equipoise.privacy.bounds.joint import clip_jointly as clip_jointly
from equipoise.privacy.bounds.second_moments import input_moments as input_moments
from equipoise.privacy.bounds.second_moments import moment_action as moment_action
from equipoise.privacy.bounds.second_moments import second_moment as second_moment
from equipoise.privacy.bounds.two_thresholds import Selection as Selection
from equipoise.privacy.bounds.two_thresholds import clip_channels as clip_channels
from equipoise.privacy.bounds.two_thresholds import clip_either as clip_either
from equipoise.privacy.bounds.two_thresholds import clip_selected as clip_selected
from equipoise.privacy.bounds.two_thresholds import clip_unbounded as clip_unbounded
from equipoise.privacy.bounds.two_thresholds import top_share as top_share
from equipoise.privacy.digests import digest as digest
from equipoise.privacy.errors import BudgetError as BudgetError
from equipoise.privacy.errors import ChangedQueryError as ChangedQueryError
from equipoise.privacy.errors import JournalError as JournalError
from equipoise.privacy.errors import LedgerError as LedgerError
from equipoise.privacy.errors import PlanError as PlanError
from equipoise.privacy.errors import PlanUsedUpError as PlanUsedUpError
from equipoise.privacy.ledger.journal import Journal as Journal
from equipoise.privacy.ledger.ledger import Ledger as Ledger
from equipoise.privacy.ledger.replay import ReplayLedger as ReplayLedger
from equipoise.privacy.ledger.run_record import Hole as Hole
from equipoise.privacy.ledger.run_record import RunRecord as RunRecord
from equipoise.privacy.mechanisms import MECHANISMS as MECHANISMS
from equipoise.privacy.mechanisms import BandedGaussian as BandedGaussian
from equipoise.privacy.mechanisms import Gaussian as Gaussian
from equipoise.privacy.mechanisms import GridGaussian as GridGaussian
from equipoise.privacy.mechanisms import JointGaussian as JointGaussian
from equipoise.privacy.mechanisms import Mechanism as Mechanism
from equipoise.privacy.mechanisms import Staged as Staged
from equipoise.privacy.mechanisms import mechanism_from as mechanism_from
from equipoise.privacy.mechanisms.joint_gaussian import radial_sensitivity as radial_sensitivity
from equipoise.privacy.mechanisms.toeplitz import optimal_coefficients as optimal_coefficients
from equipoise.privacy.mechanisms.toeplitz import prefix_error as prefix_error
from equipoise.privacy.mechanisms.toeplitz import square_root_coefficients as square_root_coefficients
from equipoise.privacy.noise.secrets import Secrets as Secrets
from equipoise.privacy.noise.secrets import secret_generator as secret_generator
from equipoise.privacy.plan import PrivacyPlan as PrivacyPlan
from equipoise.privacy.plan import Release as Release
from equipoise.privacy.plan import Unproven as Unproven
from equipoise.privacy.private import Draw as Draw
from equipoise.privacy.private import Private as Private
from equipoise.privacy.private import PrivateError as PrivateError
from equipoise.privacy.private import mark as mark
from equipoise.privacy.private import unmark as unmark
from equipoise.privacy.rows import PrivateRows as PrivateRows
from equipoise.privacy.sampling import SAMPLINGS as SAMPLINGS
from equipoise.privacy.sampling import CyclicPoisson as CyclicPoisson
from equipoise.privacy.sampling import FixedEpochs as FixedEpochs
from equipoise.privacy.sampling import FullBatch as FullBatch
from equipoise.privacy.sampling import Poisson as Poisson
from equipoise.privacy.sampling import Sampling as Sampling
from equipoise.privacy.sampling import TruncatedPoisson as TruncatedPoisson
from equipoise.privacy.sampling import WithoutReplacement as WithoutReplacement
from equipoise.privacy.sampling import sampling_from as sampling_from
from equipoise.privacy.unit import RECORD as RECORD
from equipoise.privacy.unit import Unit as Unit
