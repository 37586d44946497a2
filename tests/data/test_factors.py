"""Upsampling factors: as many as OpenCLIP expects, or a sentence."""

import pytest

from openclip_linattn.data.training.factors import settle_factors
from openclip_linattn.errors import UserError


@pytest.fixture
def two_patterns(good_set, make_tar, make_sample):
    """A folder of tars under two names, which becomes two patterns."""
    make_tar(good_set / "more0.tar", make_sample("a"))
    return good_set


def test_as_many_factors_as_parts_pass(good_set):
    source = f"{good_set}/00000.tar::{good_set}/{{00001..00003}}.tar"
    assert settle_factors("2::0.5", source, resampled=True) == "2::0.5"
    assert settle_factors("0::1", source, resampled=True) == "0::1"


def test_a_part_that_becomes_several_patterns_gives_each_its_factor(two_patterns):
    source = f"{two_patterns}::{two_patterns}/00000.tar"
    assert settle_factors("2::1", source, resampled=True) == "2::2::1"
    assert settle_factors("3::2::1", source, resampled=True) == "3::2::1"


def test_the_lines_of_a_list_may_have_one_factor_each(good_set, tmp_path):
    listed = tmp_path / "sources.txt"
    listed.write_text(f"{good_set}/{{00000..00001}}.tar\n{good_set}/{{00002..00003}}.tar\n")
    assert settle_factors("2::1", str(listed), resampled=True) == "2::1"
    assert settle_factors("2", str(listed), resampled=True) == "2::2"


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ("2", "there are 1 factors for the 2 parts"),
        ("1::2::3", "there are 3 factors for the 2 parts"),
        ("2,1", "'2,1' is not a number"),
        ("1::-1", "'-1' is not a number from 0 on"),
        ("1::", "'' is not a number"),
        ("inf::1", "'inf' is not a number"),
        ("nan::1", "'nan' is not a number"),
        ("0::0.0", "all factors are 0"),
    ],
)
def test_what_openclip_would_fail_on_is_said(good_set, factors, words):
    with pytest.raises(UserError, match=words):
        settle_factors(factors, f"{good_set}/00000.tar::{good_set}/00001.tar", resampled=True)


def test_factors_without_replacement_are_refused(good_set):
    with pytest.raises(UserError, match="give --dataset-resampled too"):
        settle_factors("1", f"{good_set}/00000.tar", resampled=False)
