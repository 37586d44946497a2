"""Sources: expanded as OpenCLIP does, and refused with the right form where it could not read them."""

import pytest

from openclip_linattn.data.patterns import brace_pattern
from openclip_linattn.data.sources import as_pattern, expand
from openclip_linattn.errors import UserError


def refusal(source, **options):
    with pytest.raises(UserError) as caught:
        expand(source, **options)
    return str(caught.value)


def openclip_urls(source):
    return pytest.importorskip("webdataset").shardlists.expand_urls(source)


@pytest.mark.parametrize(
    "form",
    [
        "{folder}/{{00000..00003}}.tar",
        "{folder}/{{00003..00000}}.tar",
        "{folder}/00001.tar",
        "{folder}/{{00000,00002}}.tar::{folder}/00003.tar",
        "{folder}/{{{{00000..00001}},00003}}.tar",
        "file:{folder}/{{00000..00003}}.tar",
        "pipe:cat {folder}/{{00000..00003}}.tar",
        "pipe:cat {folder}/{{00000..00001}}.tar::pipe:cat {folder}/{{00002..00003}}.tar",
        "pipe:cat {folder}/00000.tar::{folder}/00001.tar",
        "pipe:aws s3 cp s3://bucket/{{000..003}}.tar -",
        "pipe:aws --profile x s3 cp s3://bucket/{{000..003}}.tar - | cat",
        "https://example.invalid/{{0..3}}.tar",
        "pipe:cat {folder}/{{00000..00003}}.tar | sh -c 'cat; : {{a:b}} ${{#}}'",
    ],
)
def test_expands_as_openclip_does(form, good_set):
    source = form.format(folder=good_set)
    assert expand(source) == openclip_urls(source)


def test_environment_variables_are_replaced_as_openclip_does(good_set, monkeypatch):
    monkeypatch.setenv("WDS_ROOT", str(good_set))
    source = "${ROOT}/{00000..00001}.tar"
    assert expand(source) == openclip_urls(source) == [f"{good_set}/0000{n}.tar" for n in range(2)]


def test_an_unset_variable_is_named():
    assert "environment variable WDS_NOT_SET" in refusal("${NOT_SET}/0.tar")


def test_a_folder_stands_for_its_shards(good_set):
    assert expand(str(good_set)) == [f"{good_set}/0000{n}.tar" for n in range(4)]
    assert as_pattern(str(good_set)) == f"{good_set}/{{00000..00003}}.tar"
    assert openclip_urls(as_pattern(str(good_set))) == expand(str(good_set))


def test_other_sources_are_patterns_already(good_set):
    source = f"{good_set}/{{00000..00003}}.tar::pipe:cat x"
    assert as_pattern(source) == source


def test_a_folder_with_gaps_and_single_digits(tmp_path, make_tar):
    for number in (0, 1, 2, 9, 10, 12):
        make_tar(tmp_path / f"{number}.tar", [])
    pattern = as_pattern(str(tmp_path))
    assert pattern == f"{tmp_path}/{{{{0..2}},{{9..10}},12}}.tar"
    assert openclip_urls(pattern) == expand(str(tmp_path))


@pytest.mark.parametrize(
    "paths",
    [
        ["a/00000.tar"],
        ["a/00008.tar", "a/00009.tar", "a/00010.tar"],
        ["a/0.tar", "a/1.tar", "a/9.tar", "a/10.tar", "a/100.tar"],
        ["a/099.tar", "a/100.tar", "b/101.tar", "c.tar"],
        ["a/99999.tar", "a/100000.tar"],
        ["a/part-3-of-4.tar", "a/part-4-of-4.tar"],
        ["x.tar", "y.tar"],
        ["my{data}/0.tar", "my{data}/1.tar", "back\\slash/{a,b}2.tar"],
        ["a/09.tar", "a/10.tar", "a/011.tar"],
    ],
)
def test_patterns_expand_to_what_they_stand_for(paths):
    assert openclip_urls(brace_pattern(paths)) == paths


@pytest.mark.parametrize(
    ("form", "right"),
    [
        ("{00000 .. 00003}", "write {00000..00003}"),
        ("{00000...00003}", "write {00000..00003}"),
        ("{00000-00003}", "write {00000..00003}"),
        ("{ 00000..00003 }", "write {00000..00003}"),
        ("{00000}", "a range is written as {00000..00099}"),
        ("{00000..00003", "unbalanced braces"),
    ],
)
def test_ranges_that_do_not_expand(form, right, good_set):
    assert right in refusal(f"{good_set}/{form}.tar")


def test_a_range_that_does_not_expand_within_a_pipe():
    assert "write {0..3}" in refusal("pipe:cat data/{0 .. 3}.tar")


def test_a_wildcard_shows_the_pattern(good_set):
    assert f"write {good_set}/{{00000..00003}}.tar" in refusal(f"{good_set}/*.tar")


def test_missing_shards_are_counted_and_the_rest_named(good_set):
    text = refusal(f"{good_set}/{{00000..00007}}.tar")
    assert "4 of 8 shards" in text
    assert "00004.tar, 00005.tar, 00006.tar, ..." in text
    assert f"{good_set}/{{00000..00003}}.tar" in text


def test_missing_shards_are_left_out_where_told(good_set):
    source = f"{good_set}/{{00002..00007}}.tar"
    assert expand(source, allow_missing=True) == [f"{good_set}/0000{n}.tar" for n in (2, 3)]


def test_all_shards_missing_is_refused_in_any_case(good_set):
    assert "its shards are" in refusal(f"{good_set}/{{1..4}}.tar", allow_missing=True)


def test_missing_folder(tmp_path):
    assert f"The folder {tmp_path}/absent" in refusal(f"{tmp_path}/absent/{{0..3}}.tar")


def test_folder_without_shards(tmp_path, make_tar):
    assert "has no .tar files" in refusal(str(tmp_path))
    make_tar(tmp_path / "train" / "0.tar", [])
    assert f"did you mean {tmp_path}/train" in refusal(str(tmp_path))


@pytest.mark.parametrize("source", ["", "  ", "a.tar::", "::a.tar"])
def test_empty_sources(source):
    assert "empty" in refusal(source)


def test_blank_beside_the_double_colon(good_set):
    text = refusal(f"{good_set}/00000.tar :: {good_set}/00001.tar")
    assert "begins or ends with a blank" in text


def test_a_path_with_a_blank_works(tmp_path, make_tar, make_sample):
    make_tar(tmp_path / "my data" / "00000.tar", make_sample("0"))
    source = str(tmp_path / "my data" / "{00000..00000}.tar")
    assert expand(source) == openclip_urls(source) == [str(tmp_path / "my data" / "00000.tar")]


def test_a_double_colon_within_one_pipe_shows_the_whole_form():
    text = refusal("pipe:aws s3 cp s3://a/{00..01}.tar::s3://b/{00..02}.tar -")
    assert "pipe:aws s3 cp s3://a/{00..01}.tar -::pipe:aws s3 cp s3://b/{00..02}.tar -" in text


@pytest.mark.parametrize(
    ("source", "right"),
    [
        ("pipe:aws s3 cp s3://a/{00..01}.tar", "pipe:aws s3 cp s3://a/{00..01}.tar -"),
        ("pipe:gsutil -q cp gs://a/0.tar", "pipe:gsutil -q cp gs://a/0.tar -"),
        ("pipe:aws s3 cp s3://a/0.tar x.tar", "pipe:aws s3 cp s3://a/0.tar -"),
        ("s3://a/{00..01}.tar", "pipe:aws s3 cp s3://a/{00..01}.tar -"),
        ("pipe:", "has no command"),
        ("nfs://a/0.tar", "webdataset cannot open"),
    ],
)
def test_remote_sources_that_webdataset_cannot_read(source, right):
    assert right in refusal(source)


@pytest.mark.parametrize("ranges", ["{0..99999999}", "{0..9999}/{0..9999}"])
def test_a_source_that_expands_without_end(ranges):
    assert "more than 1,000,000 shards" in refusal(f"pipe:cat {ranges}.tar")
