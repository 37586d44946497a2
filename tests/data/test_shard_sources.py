"""Sources: expanded as OpenCLIP does, and refused with the right form where it could not read them."""

import os

import pytest

from openclip_linattn.data.sources import as_pattern, expand, pipe_forms
from openclip_linattn.data.sources.patterns import brace_pattern
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


def test_a_folder_may_be_given_as_a_file_url(good_set):
    assert expand(f"file:{good_set}") == expand(f"file://{good_set}") == expand(str(good_set))
    assert as_pattern(f"file:{good_set}") == f"{good_set}/{{00000..00003}}.tar"


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


def test_a_name_with_brackets_is_no_wildcard_where_the_file_is_there(tmp_path, make_tar):
    for number in range(2):
        make_tar(tmp_path / f"[a]{number}.tar", [])
    source = f"{tmp_path}/[a]{{0..1}}.tar"
    assert expand(source) == openclip_urls(source)
    assert expand(as_pattern(str(tmp_path))) == expand(str(tmp_path))


def test_a_wildcard_beside_braces_shows_no_half_of_the_shards(good_set):
    assert "a range is written as" in refusal(f"{good_set}/*{{0..3}}.tar")


def test_wildcards_of_a_store_are_refused_and_those_of_a_query_are_not():
    assert "does not expand wildcards" in refusal("s3://bucket/*.tar")
    assert expand("https://b.invalid/0.tar?x=*") == ["https://b.invalid/0.tar?x=*"]


@pytest.mark.parametrize(
    "source", ["a" * 5000, "a" * 5000 + ".tar", "*" * 5000 + ".tar", "a" * 5000 + "/0.tar"]
)
def test_a_name_too_long_for_any_file_is_a_sentence(source):
    assert source[:100] in refusal(source)


@pytest.fixture
def other_user(tmp_path):
    """Runs what follows as a user for whom permissions count."""
    if os.geteuid():
        yield
        return
    own = [
        folder for folder in tmp_path.parents if "pytest-of-" in str(folder)
    ]  # more of them in parallel runs
    for folder in (tmp_path, *own):
        folder.chmod(0o755)
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_a_folder_that_is_closed_is_named_as_such(tmp_path, make_tar, request):
    make_tar(tmp_path / "set" / "0.tar", [])
    (tmp_path / "set").chmod(0)
    request.getfixturevalue("other_user")
    for source in (f"{tmp_path}/set", f"{tmp_path}/set/{{0..1}}.tar", f"{tmp_path}/set/below"):
        assert f"The folder {tmp_path}/set cannot be read: Permission denied." in refusal(source)


def test_a_folder_that_may_be_entered_and_not_listed_is_read(tmp_path, make_tar, request):
    make_tar(tmp_path / "set" / "0.tar", [])
    (tmp_path / "set").chmod(0o111)
    request.getfixturevalue("other_user")
    assert "cannot be read" in refusal(f"{tmp_path}/set")
    assert expand(f"{tmp_path}/set/0.tar") == [f"{tmp_path}/set/0.tar"]
    assert "1 of 2 shards" in refusal(f"{tmp_path}/set/{{0..1}}.tar")


def test_a_pattern_of_thousands_of_gaps_is_left_out_of_the_sentence(tmp_path):
    for number in range(0, 2000, 2):
        (tmp_path / f"{number}.tar").touch()
    text = refusal(f"{tmp_path}/{{0..1999}}.tar")
    assert "1,000 of 2,000 shards" in text
    assert text.endswith("or name the 1,000 that are there.")


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
        ("pipe:", "has no command"),
        ("hdfs://a/{0..1}.tar", "write 'pipe:hdfs dfs -cat hdfs://a/{0..1}.tar'"),
        ("nfs://a/0.tar", "webdataset cannot open"),
        ("http://[1/0.tar", "cannot be opened as a path or a URL"),
    ],
)
def test_remote_sources_that_nothing_can_read(source, right):
    assert right in refusal(source)


def test_urls_are_sources_beside_others(good_set):
    source = f"pipe:cat {good_set}/00000.tar::s3://a/{{00..01}}.tar::https://b.invalid/0.tar::gs://c/0.tar"
    assert expand(source) == openclip_urls(source)
    assert len(expand(source)) == 5


def test_s3_without_its_client_names_the_package_and_the_command(monkeypatch):
    monkeypatch.setattr(pipe_forms, "find_spec", lambda name: None)
    text = refusal("s3://a/{00..01}.tar")
    assert "pip install 'openclip-linattn[remote]'" in text
    assert "'pipe:aws s3 cp s3://a/{00..01}.tar -'" in text


@pytest.mark.parametrize("ranges", ["{0..99999999}", "{0..9999}/{0..9999}"])
def test_a_source_that_expands_without_end(ranges):
    assert "more than 1,000,000 shards" in refusal(f"pipe:cat {ranges}.tar")


def written(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("ending", ["txt", "list"])
def test_a_list_stands_for_what_its_lines_stand_for(ending, good_set, tmp_path):
    shards = expand(str(good_set))
    source = written(
        tmp_path / f"sources.{ending}",
        "# the first two",
        shards[0],
        f"  {shards[1]}  ",
        "",
        str(good_set),
        f"pipe:cat {good_set}/{{00000..00001}}.tar::{shards[3]}",
        "s3://bucket/{0..1}.tar",
    )
    commands = [f"pipe:cat {shard}" for shard in shards[:2]]
    urls = [*shards[:2], *shards, *commands, shards[3], "s3://bucket/0.tar", "s3://bucket/1.tar"]
    assert expand(source) == urls
    assert openclip_urls(as_pattern(source)) == urls


def test_a_list_from_windows_is_read(good_set, tmp_path):
    lines = f"\ufeff{good_set}/00000.tar\r\n\r\n{good_set}/00001.tar\r\n"
    (tmp_path / "a.txt").write_bytes(lines.encode())
    assert expand(str(tmp_path / "a.txt")) == [f"{good_set}/0000{n}.tar" for n in range(2)]


def test_a_list_may_stand_beside_other_sources(good_set, tmp_path):
    source = written(tmp_path / "a.txt", f"{good_set}/00001.tar") + f"::{good_set}/00000.tar"
    assert expand(source) == openclip_urls(as_pattern(source)) == [f"{good_set}/0000{n}.tar" for n in (1, 0)]


def test_single_shards_of_a_list_become_one_short_pattern(good_set, tmp_path):
    source = written(tmp_path / "a.txt", *(f"s3://b/set/{n:05d}.tar" for n in range(5000) if n != 7))
    assert as_pattern(source) == "s3://b/set/{{00000..00006},{00008..04999}}.tar"


def test_variables_are_replaced_in_the_pattern_because_weighted_sources_need_it(good_set, monkeypatch):
    monkeypatch.setenv("WDS_ROOT", str(good_set))
    assert as_pattern("${ROOT}/{00000..00001}.tar") == f"{good_set}/{{00000..00001}}.tar"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("data/{0 .. 3}.tar", "write {0..3}"),
        ("more.list", "more.list is a list itself"),
        ("pipe:aws s3 cp s3://a/0.tar", "does not write to its standard output"),
        ("pipe:aws s3 cp s3://a/0.tar::s3://b/0.tar -", "cuts a command in two"),
        ("a.tar::", "empty part"),
        ("absent/0.tar", "there is no absent/0.tar (1 of 2 shards of"),
    ],
)
def test_a_wrong_line_is_named(line, says, good_set, tmp_path):
    source = written(tmp_path / "a.txt", "# comment", f"{good_set}/00000.tar", line)
    text = refusal(source)
    assert text.startswith(f"{source}, line 3: ")
    assert says in text


def test_missing_shards_of_a_list_are_left_out_where_told(good_set, tmp_path):
    source = written(tmp_path / "a.txt", f"{good_set}/00000.tar", f"{good_set}/00009.tar")
    assert expand(source, allow_missing=True) == [f"{good_set}/00000.tar"]


def test_lists_that_cannot_be_read_or_name_nothing(tmp_path):
    assert f"The list {tmp_path}/absent.txt cannot be read: No such file" in refusal(f"{tmp_path}/absent.txt")
    assert "names no source" in refusal(written(tmp_path / "empty.txt", "# nothing", ""))
    (tmp_path / "binary.list").write_bytes(b"\xff\xfe\x00")
    assert "is not a text file" in refusal(f"{tmp_path}/binary.list")
