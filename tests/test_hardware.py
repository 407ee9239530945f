"""The catalogue of cards: its values hang together, loose names find the right card, every choice has a reason."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.hardware import Card, all_cards, ceiling_bytes, context_bytes, find_card, typical_card
from planner.units import GIB, MIB

CARDS = all_cards()
GENERATION = {
    (6, 0): "Pascal",
    (6, 1): "Pascal",
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 6): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
    (12, 0): "Blackwell",
}
every_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)


def problem(error: pytest.ExceptionInfo[InputError]) -> tuple[str, str]:
    """Argument and message of an InputError with one problem, which is one line."""
    (only,) = error.value.problems
    assert "\n" not in only.message
    return only.argument, only.message


# The catalogue ----------------------------------------------------------------------------------------


def test_catalogue_spans_the_promised_cards() -> None:
    """At least 45 cards, each once, from the GTX 1060 to the B200, sorted by name."""
    names = [card.name for card in CARDS]
    assert len(names) >= 45
    assert sorted(set(names)) == names
    assert {"GTX 1060 3GB", "GTX 1060 6GB", "T4 16GB", "RTX 5090 32GB", "B200 180GB"} <= set(names)


@every_card
def test_memory_is_less_than_the_label_but_not_much(card: Card) -> None:
    """Programs see less than the box says: up to 8 %, and 10 % where ECC takes its share of GDDR6."""
    assert card.label_bytes % GIB == 0
    assert card.reported_bytes % MIB == 0
    assert 0.90 * card.label_bytes < card.reported_bytes < card.label_bytes
    assert card.name.endswith(f" {card.label.replace(' ', '')}")


@every_card
def test_types_follow_the_compute_capability(card: Card) -> None:
    """bf16 and tf32 exist from 8.0 on, and the rates name exactly the types that the hardware has."""
    modern = card.compute_capability >= (8, 0)
    assert card.compute_capability in GENERATION
    assert card.supports_bf16 is modern
    assert card.supports_tf32 is modern
    expected = {"fp32", "tf32", "fp16", "bf16"} if modern else {"fp32", "fp16"}
    assert set(card.dense_flops_per_s) == expected


@every_card
def test_rates_are_ordered_as_the_hardware_is(card: Card) -> None:
    """Tensor cores at least double fp32; without them fp16 runs at the fp32 rate; bf16 runs as fp16 does."""
    rates = card.dense_flops_per_s
    ratio = rates["fp16"] / rates["fp32"]
    if card.has_tensor_cores:
        assert 1.99 < ratio < 31
    else:
        assert ratio == 1
    if card.supports_bf16:
        assert rates["fp16"] == rates["bf16"]
        assert rates["tf32"] == pytest.approx(rates["fp16"] / 2, rel=0.02)


@every_card
def test_rates_lie_within_the_generation(card: Card) -> None:
    """fp32 rate and bandwidth lie in the range that the generation's cards span."""
    tflops, gb_per_s = card.dense_flops_per_s["fp32"] / 1e12, card.memory_bandwidth_bytes_per_s / 1e9
    spans = {
        "Pascal": ((3.5, 12.5), (190, 740)),
        "Volta": ((13, 16), (600, 910)),
        "Turing": ((2.9, 16.5), (120, 680)),
        "Ampere": ((7.5, 40.1), (190, 2040)),
        "Ada": ((12, 92), (190, 1010)),
        "Hopper": ((40, 68), (2000, 4900)),
        "Blackwell": ((19, 127), (400, 8000)),
    }
    (low, high), (narrow, wide) = spans[GENERATION[card.compute_capability]]
    assert low <= tflops <= high
    assert narrow <= gb_per_s <= wide


@every_card
def test_host_link_is_pcie_of_the_generation(card: Card) -> None:
    """PCIe 3, 4 or 5 with 8 or 16 lanes, in the generation's version; only Grace Hopper has another link."""
    version = {6: (3,), 7: (3,), 8: (4,), 9: (5,), 10: (5,), 12: (5,)}[card.compute_capability[0]]
    links = {int(2**v * 1e9 * lanes * 128 / 130 / 8) for v in version for lanes in (8, 16)}
    if card.name == "GH200 96GB":
        links = {450_000_000_000}
    assert card.pcie_bytes_per_s in links


@every_card
def test_every_value_has_a_source(card: Card) -> None:
    """Reported memory, bandwidth, rates and link each say where they come from."""
    for value in ("reported_bytes: ", "memory_bandwidth: ", "dense_flops: ", "pcie: "):
        assert value in card.source
    printed_gib = float(card.source.removeprefix("reported_bytes: ").split(" GiB", maxsplit=1)[0])
    assert 0 <= printed_gib * GIB - card.reported_bytes < MIB


@pytest.mark.parametrize(
    ("name", "fp32", "tf32", "fp16", "gb_per_s"),
    [
        ("GTX 1080 Ti 11GB", 11.3, None, 11.3, 484),
        ("RTX 2080 Ti 11GB", 13.4, None, 53.8, 616),
        ("Titan RTX 24GB", 16.3, None, 130.5, 672),
        ("T4 16GB", 8.1, None, 65, 320),
        ("V100 SXM2 16GB", 15.7, None, 125, 900),
        ("A100 SXM4 80GB", 19.5, 156, 312, 2039),
        ("RTX 3090 24GB", 35.6, 35.6, 71, 936),
        ("RTX A6000 48GB", 38.7, 77.4, 154.8, 768),
        ("RTX 4090 24GB", 82.6, 82.6, 165.2, 1008),
        ("RTX 6000 Ada 48GB", 91.1, 182.1, 364.2, 960),
        ("RTX 5090 32GB", 104.8, 104.8, 209.5, 1792),
        ("L4 24GB", 30.3, 60, 121, 300),
        ("L40S 48GB", 91.6, 183, 362, 864),
        ("H100 SXM 80GB", 67, 494.7, 989.4, 3350),
        ("B200 180GB", 75, 1125, 2250, 7700),
    ],
)
def test_rates_equal_the_published_ones(
    name: str, fp32: float, tf32: float | None, fp16: float, gb_per_s: float
) -> None:
    """Dense TFLOPS and GB/s as the whitepapers and datasheets print them, fp16 with fp32 accumulation."""
    card = find_card(name)
    rates = {kind: rate / 1e12 for kind, rate in card.dense_flops_per_s.items()}
    assert fp32 == pytest.approx(rates["fp32"], rel=0.01)
    assert (None if tf32 is None else pytest.approx(tf32, rel=0.01)) == rates.get("tf32")
    assert fp16 == pytest.approx(rates["fp16"], rel=0.01)
    assert gb_per_s == pytest.approx(card.memory_bandwidth_bytes_per_s / 1e9, rel=0.01)


def test_t4_has_tensor_cores_but_neither_bf16_nor_tf32() -> None:
    """torch says that a T4 supports bf16, because emulation counts; the catalogue doesn't."""
    t4 = find_card("Tesla T4")
    assert t4.has_tensor_cores
    assert not t4.supports_bf16
    assert not t4.supports_tf32


def test_gtx_16_series_has_no_tensor_cores() -> None:
    """A GTX 1660 Ti has the compute capability of an RTX 2080 without its tensor cores."""
    assert find_card("GTX 1660 Ti").compute_capability == find_card("RTX 2080").compute_capability
    assert not find_card("GTX 1660 Ti").has_tensor_cores
    assert find_card("RTX 2080").has_tensor_cores


def test_professional_and_geforce_cards_differ_by_accumulation() -> None:
    """GeForce runs fp32 accumulation at half rate: 2 x fp32; professional cards of the chip at 4 x."""
    for name, expected in (("RTX 4090", 2), ("RTX 6000 Ada", 4), ("RTX 5090", 2), ("RTX PRO 6000", 4)):
        rates = find_card(name).dense_flops_per_s
        assert expected == pytest.approx(rates["fp16"] / rates["fp32"], rel=0.01)


def test_a_card_is_plain_data_for_the_plan() -> None:
    """plan.json's hardware part is JSON types only, and the card itself cannot be changed."""
    card = find_card("RTX 3060")
    data = card.as_dict()
    assert data["compute_capability"] == [8, 6]
    assert dict(card.dense_flops_per_s) == data["dense_flops_per_s"]
    assert type(data["dense_flops_per_s"]) is dict
    with pytest.raises(TypeError):
        card.dense_flops_per_s["fp32"] = 1.0  # type: ignore[index]
    assert len({card, find_card("3060")}) == 1


# Names ------------------------------------------------------------------------------------------------


@every_card
def test_every_card_is_found_by_its_own_name(card: Card) -> None:
    """The catalogue's name, as it stands, in lower case and without spaces."""
    assert card == find_card(card.name)
    assert card == find_card(card.name.lower())
    assert card == find_card(card.name.replace(" ", "-"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx3060", "RTX 3060 12GB"),
        ("RTX 3060 12GB", "RTX 3060 12GB"),
        ("3060 12g", "RTX 3060 12GB"),
        ("3060ti", "RTX 3060 Ti 8GB"),
        ("4090", "RTX 4090 24GB"),
        ("4070tisuper", "RTX 4070 Ti Super 16GB"),
        ("4070 Ti", "RTX 4070 Ti 12GB"),
        ("4060 ti 16gb", "RTX 4060 Ti 16GB"),
        ("a100 80", "A100 SXM4 80GB"),
        ("a100_80gb", "A100 SXM4 80GB"),
        ("A100 PCIe 40 GB", "A100 PCIe 40GB"),
        ("H100", "H100 SXM 80GB"),
        ("h100 94gb", "H100 NVL 94GB"),
        ("v100 32", "V100 SXM2 32GB"),
        ("H20-96GB", "H20 96GB"),
        ("b200 192gb", "B200 180GB"),
        ("L40S 45GB", "L40S 48GB"),
        ("Tesla T4 (15GB)", "T4 16GB"),
        ("RTX 2060 (8GB)", "RTX 2060 Super 8GB"),
        ("rtxa6000", "RTX A6000 48GB"),
        ("6000 ada", "RTX 6000 Ada 48GB"),
        ("rtxpro6000", "RTX PRO 6000 Blackwell 96GB"),
        ("titanx", "Titan X Pascal 12GB"),
    ],
)
def test_loose_names(text: str, name: str) -> None:
    """What people type: glued, abbreviated, with or without the size."""
    assert name == find_card(text).name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA GeForce GTX 1060 6GB", "GTX 1060 6GB"),
        ("NVIDIA GeForce GTX 1660 Ti", "GTX 1660 Ti 6GB"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", "RTX 3080 Ti Laptop 16GB"),
        ("NVIDIA GeForce RTX 2060 SUPER", "RTX 2060 Super 8GB"),
        ("TITAN X (Pascal)", "Titan X Pascal 12GB"),
        ("NVIDIA TITAN Xp", "Titan Xp 12GB"),
        ("NVIDIA TITAN RTX", "Titan RTX 24GB"),
        ("TITAN V", "Titan V 12GB"),
        ("Quadro RTX 6000", "Quadro RTX 6000 24GB"),
        ("Tesla T4", "T4 16GB"),
        ("Tesla P100-PCIE-16GB", "P100 PCIe 16GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe 32GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA A10G", "A10G 24GB"),
        ("NVIDIA L4", "L4 24GB"),
        ("NVIDIA A30-PCIE-24GB", "A30 24GB"),
        ("NVIDIA RTX A6000", "RTX A6000 48GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell 96GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q 96GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
        ("NVIDIA H100 NVL", "H100 NVL 94GB"),
        ("NVIDIA H200", "H200 SXM 141GB"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA B200", "B200 180GB"),
    ],
)
def test_names_that_torch_reports(text: str, name: str) -> None:
    """torch.cuda.get_device_name() finds the card, so a probed device needs no other table."""
    assert name == find_card(text).name


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("A100", ["A100 SXM4 40GB", "A100 SXM4 80GB"]),
        ("NVIDIA GeForce RTX 3080", ["RTX 3080 10GB", "RTX 3080 12GB"]),
        ("RTX 2060", ["RTX 2060 12GB", "RTX 2060 6GB"]),
        ("RTX 6000", ["Quadro RTX 6000 24GB", "RTX 6000 Ada 48GB", "RTX PRO 6000 Blackwell 96GB"]),
    ],
)
def test_ambiguous_names_list_the_candidates(text: str, candidates: list[str]) -> None:
    """A name that leaves the memory or the model open is refused, with what it could mean."""
    with pytest.raises(InputError) as error:
        find_card(text)
    argument, message = problem(error)
    assert argument == "gpu"
    assert message.endswith(", ".join(candidates))


@pytest.mark.parametrize(
    ("text", "vram_bytes", "name"),
    [
        ("A100", 40 * GIB, "A100 SXM4 40GB"),
        ("A100", 80 * GIB, "A100 SXM4 80GB"),
        ("A100", 30 * GIB, "A100 SXM4 40GB"),
        ("A100 PCIE", 50 * GIB, "A100 PCIe 80GB"),
        ("A100", 500 * GIB, "A100 SXM4 80GB"),
        ("NVIDIA GeForce RTX 3080", 10_500_000_000, "RTX 3080 10GB"),
        ("RTX 6000", 48 * GIB, "RTX 6000 Ada 48GB"),
        ("RTX 3060", 8 * GIB, "RTX 3060 12GB"),
    ],
)
def test_memory_decides_what_the_name_leaves_open(text: str, vram_bytes: int, name: str) -> None:
    """The smallest card of the model that holds what was asked for, or what the device reports."""
    assert name == find_card(text, vram_bytes=vram_bytes).name


def test_memory_never_decides_between_models() -> None:
    """20 GiB of an "RTX 6000" may be any of three cards of three generations."""
    with pytest.raises(InputError):
        find_card("RTX 6000", vram_bytes=20 * GIB)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("RTX 3065", "RTX 3060 12GB"),
        ("RTX 3060 24GB", "RTX 3060 12GB"),
        ("h10", "H100 SXM 80GB"),
        ("3080 16GB", "RTX 3080 12GB"),
        ("rtx 4080 laptop", "RTX 4090 Laptop 16GB"),
        ("titan", "Titan RTX 24GB"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100 SXM4 40GB"),
    ],
)
def test_unknown_names_list_near_matches(text: str, near: str) -> None:
    """A misspelt name, a size that no such card has, a slice of a card: refused, with what is near."""
    with pytest.raises(InputError) as error:
        find_card(text)
    argument, message = problem(error)
    assert argument == "gpu"
    assert repr(text) in message
    assert near in message.split("near: ")[1].split(", ")


@pytest.mark.parametrize("text", ["", "   ", "nvidia", "80GB", "gpu", "Radeon", "a\nb", "x" * 500, "\u2603"])
def test_names_near_nothing_say_so(text: str) -> None:
    """Where nothing is near, the remedy is to leave the name out."""
    with pytest.raises(InputError) as error:
        find_card(text)
    argument, message = problem(error)
    assert argument == "gpu"
    assert "leave it out" in message


@given(st.text(max_size=40))
def test_any_text_finds_a_card_or_raises_one_line(text: str) -> None:
    """No name, however odd, ends in anything but a card or an InputError of one line."""
    try:
        assert find_card(text) in CARDS
    except InputError as error:
        assert len(str(error).splitlines()) == 1


# Sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "name"),
    [
        (4, "GTX 1650 4GB"),
        (6, "RTX 2060 6GB"),
        (8, "RTX 4060 8GB"),
        (10, "RTX 3080 10GB"),
        (11, "RTX 2080 Ti 11GB"),
        (12, "RTX 3060 12GB"),
        (16, "RTX 4060 Ti 16GB"),
        (24, "RTX 4090 24GB"),
        (32, "RTX 5090 32GB"),
        (40, "A100 SXM4 40GB"),
        (48, "L40S 48GB"),
        (80, "H100 SXM 80GB"),
        (96, "RTX PRO 6000 Blackwell 96GB"),
        (141, "H200 SXM 141GB"),
        (180, "B200 180GB"),
        (192, "B200 180GB"),
    ],
)
def test_typical_card_of_a_label(gib: int, name: str) -> None:
    """A label size has a stated typical card, and the reason says that nobody named one."""
    card, reason = typical_card(gib * GIB)
    assert name == card.name
    assert f"no card was named; typical for {gib} GB: " in reason


@pytest.mark.parametrize(
    ("gib", "name", "why"),
    [
        (1, "GTX 1060 3GB", "1 GiB; GTX 1060 3GB is the next larger"),
        (7.5, "RTX 4060 8GB", "7.50 GiB; RTX 4060 8GB is the next larger"),
        (20, "RTX 4090 24GB", "20 GiB; RTX 4090 24GB is the next larger"),
        (500, "B200 180GB", "500 GiB; B200 180GB is the largest"),
    ],
)
def test_typical_card_of_any_other_size(gib: float, name: str, why: str) -> None:
    """Other sizes take the next larger typical card, or the largest, and say so."""
    card, reason = typical_card(int(gib * GIB))
    assert name == card.name
    assert reason.endswith(why)


@given(st.integers(64 * MIB, 1024 * GIB))
def test_a_typical_card_gives_a_ceiling_that_it_can_hold(vram_bytes: int) -> None:
    """With no card named, every size has a card and a ceiling above neither the wish nor the card."""
    card, reason = typical_card(vram_bytes)
    size, why = ceiling_bytes(vram_bytes, card, named=False)
    assert min(vram_bytes, card.reported_bytes) == size
    assert reason
    assert why


@every_card
def test_a_label_sized_request_gives_what_the_card_reports(card: Card) -> None:
    """--vram 8GB on an 8 GB card cannot have 8 GiB: driver and ECC keep some."""
    size, reason = ceiling_bytes(card.label_bytes, card)
    assert card.reported_bytes == size
    assert card.name in reason


@every_card
def test_a_smaller_request_is_kept_to_the_byte(card: Card) -> None:
    """Less than the card reports is taken as it was asked for; between that and the label, what it reports."""
    assert card.reported_bytes - 1 == ceiling_bytes(card.reported_bytes - 1, card)[0]
    assert card.reported_bytes == ceiling_bytes(card.reported_bytes + 1, card)[0]


@every_card
def test_a_larger_request_than_the_label_is_refused(card: Card) -> None:
    """One byte above the label of the named card is a problem of the argument vram, with the remedy."""
    with pytest.raises(InputError) as error:
        ceiling_bytes(card.label_bytes + GIB, card)
    argument, message = problem(error)
    assert argument == "vram"
    assert f"{card.name} has {card.label}" in message
    assert f"ask for {card.label_bytes // GIB}GiB or less" in message


def test_ceiling_in_numbers() -> None:
    """An RTX 3060 of 12 GB gives 11.63 GiB, of which the reason tells."""
    size, reason = ceiling_bytes(12 * GIB, find_card("RTX 3060"))
    assert size == 11909 * MIB
    assert "RTX 3060 12GB reports 11.63 GiB to programs" in reason


@every_card
def test_context_is_a_published_size_with_its_source(card: Card) -> None:
    """Between 100 MiB and 1 GiB, less than an eighth of the card, and the reason names the generation."""
    size, reason = context_bytes(card)
    assert 100 * MIB <= size <= GIB
    assert size < card.reported_bytes / 8
    assert f"compute capability {card.compute_capability[0]}.x: " in reason
    assert "MiB" in reason


def test_context_grows_with_the_card_within_a_generation() -> None:
    """Each SM takes its share: small cards of a generation hold less than large ones."""
    for small, large in (("RTX 3060", "RTX 3090"), ("RTX 4060", "L40S"), ("RTX 5080", "RTX 5090")):
        assert context_bytes(find_card(small))[0] < context_bytes(find_card(large))[0]


def test_hardware_imports_no_torch() -> None:
    """The catalogue is for machines without a GPU, and for --help in half a second."""
    code = "import sys, planner.hardware as h; h.find_card('T4'); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
