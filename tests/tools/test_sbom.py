"""The bill of materials names what is installed, once, with what it needs."""

from __future__ import annotations

from importlib.metadata import version

from sbom import sbom


def test_the_bill_names_what_is_installed_with_what_it_needs() -> None:
    bill = sbom()
    versions = {component["name"]: component["version"] for component in bill["components"]}
    assert len(versions) == len(bill["components"]) and versions["torch"] == version("torch")
    needs = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert set(needs) == {component["bom-ref"] for component in bill["components"]}
    (laconic,) = [needs[ref] for ref in needs if ref.startswith("pkg:pypi/laconic@")]
    assert [ref.partition("@")[0] for ref in laconic] == ["pkg:pypi/numpy", "pkg:pypi/torch"]
    assert all(other in needs for others in needs.values() for other in others)
