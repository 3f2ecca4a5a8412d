from sklearn.utils.estimator_checks import parametrize_with_checks

from xentflow.estimators import FeatureFlow, MultinomialFlowClassifier
import xentflow as xf
import pytest

@pytest.mark.filterwarnings("ignore::xentflow.estimators.LabelLeakWarning")
@parametrize_with_checks([MultinomialFlowClassifier(), FeatureFlow(), FeatureFlow(oracle=xf.NearestNeighbours(1), passes=1)])
def test_scikit_learns_own_checks_pass(estimator, check):
    check(estimator)
