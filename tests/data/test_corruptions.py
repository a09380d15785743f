"""Each corruption against an independent reference where there is one, against its statistics elsewhere."""

import colorsys
import io
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage, stats
from sklearn.datasets import load_sample_images

from fedshift.core import rng
from fedshift.data.corruptions import NAMES, corrupt, corrupt_mixed, filters, mixed_choice
from fedshift.data.corruptions.apply import CORRUPTIONS
from fedshift.data.corruptions.draws import Draws
from fedshift.data.corruptions.severities import SEVERITIES
from fedshift.errors import UserError

torch.set_num_threads(1)

BLIND = ("defocus-blur", "zoom-blur", "brightness", "contrast", "pixelate", "jpeg")  # no randomness


def photographs(count: int, side: int, channels: int = 3) -> torch.Tensor:
    """Square crops of two photographs."""
    crops = []
    for i in range(count):
        picture = Image.fromarray(load_sample_images().images[i % 2])
        left, top = 40 + 23 * i % 300, 7 * i % 120
        crop = picture.crop((left, top, left + 288, top + 288)).resize((side, side), Image.Resampling.LANCZOS)
        crops.append(np.array(crop if channels == 3 else crop.convert("L")).reshape(side, side, channels))
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module")
def photos() -> torch.Tensor:
    return photographs(12, 32)


def flat(level: int, count: int = 1, side: int = 32) -> torch.Tensor:
    return torch.full((count, 3, side, side), level, dtype=torch.uint8)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt())


def test_there_are_fifteen_in_the_usual_order() -> None:
    assert ",".join(NAMES) == (
        "gaussian-noise,shot-noise,impulse-noise,defocus-blur,glass-blur,motion-blur,zoom-blur,"
        "snow,frost,fog,brightness,contrast,elastic,pixelate,jpeg"
    )
    assert tuple(SEVERITIES) == NAMES
    assert all(len(entry.small) == len(entry.large) == 5 for entry in SEVERITIES.values())


# ---------------------------------------------------------------- what holds for all


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("side", "channels"), [(32, 3), (32, 1), (64, 3), (128, 3), (128, 1)], ids=lambda value: str(value)
)
def test_shape_dtype_and_effect(name: str, side: int, channels: int) -> None:
    images = photographs(2, side, channels)
    kept = images.clone()
    out = corrupt(images, name, 3, 0, torch.arange(2))
    assert out.shape == images.shape
    assert out.dtype == torch.uint8
    assert torch.equal(images, kept)
    assert 0.5 < distance(out, images) < 150


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(8, 8), (8, 21), (37, 16), (9, 65)])
def test_odd_sizes(name: str, shape: tuple[int, int]) -> None:
    images = photographs(2, 70)[:, :, : shape[0], : shape[1]]
    for severity in (1, 2, 5):
        assert corrupt(images, name, severity, 0, torch.arange(2)).shape == images.shape


@pytest.mark.parametrize("name", NAMES)
def test_an_image_does_not_depend_on_its_batch(
    name: str, photos: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([5, 900, 2, 44, 3, 10**12, 6, 7, 1, 0, 77, 13])
    whole = corrupt(photos, name, 5, 11, ids)
    order = torch.tensor([7, 2, 11, 0, 1, 10, 4, 9, 3, 5, 8, 6])
    assert torch.equal(corrupt(photos[order], name, 5, 11, ids[order]), whole[order])
    parts = [corrupt(photos[a:b], name, 5, 11, ids[a:b]) for a, b in ((0, 1), (1, 6), (6, 12))]
    assert torch.equal(torch.cat(parts), whole)
    monkeypatch.setattr("fedshift.data.corruptions.apply.CHUNK_VALUES", {"cpu": 5 * 3 * 32 * 32})
    assert torch.equal(corrupt(photos, name, 5, 11, ids), whole)
    torch.set_num_threads(2)
    try:
        assert torch.equal(corrupt(photos, name, 5, 11, ids), whole)
    finally:
        torch.set_num_threads(1)
    strided = photos.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert torch.equal(corrupt(strided, name, 5, 11, ids), whole)


@pytest.mark.parametrize("name", NAMES)
def test_draws_follow_seed_and_id(name: str) -> None:
    images = photographs(1, 32).expand(3, -1, -1, -1)
    out = corrupt(images, name, 5, 1, torch.tensor([1, 1, 2]))
    assert torch.equal(out[0], out[1])
    other = corrupt(images, name, 5, 2, torch.tensor([1, 1, 2]))
    assert torch.equal(out[0], out[2]) == (name in BLIND)
    assert torch.equal(out[0], other[0]) == (name in BLIND)


@pytest.mark.parametrize("side", [32, 128, 224])
@pytest.mark.parametrize("name", NAMES)
def test_severity_grows(name: str, side: int) -> None:
    images = photographs(12, side).repeat(4, 1, 1, 1) if side == 32 else photographs(2, side)
    moved = [distance(corrupt(images, name, s, 3, torch.arange(len(images))), images) for s in range(1, 6)]
    if name in ("glass-blur", "elastic") and side < 224:
        assert min(moved) > 5  # their small constants trade displacement for blur, a global warp for a local one
    elif name == "frost":
        assert moved[0] < moved[1] < moved[2]  # then the image is dimmed as fast as frost is added
        assert moved[0] < moved[4]
    else:  # motion blur 3 and 4 of small images differ only in how far the same Gaussian is followed
        assert all(low < high + 0.02 for low, high in pairwise(moved)), moved
        assert moved[0] < 0.9 * moved[4]


def test_empty_batch() -> None:
    nothing = torch.zeros(0, 3, 32, 32, dtype=torch.uint8)
    for name in NAMES:
        assert corrupt(nothing, name, 1, 0, torch.zeros(0, dtype=torch.int64)).shape == nothing.shape
    assert corrupt_mixed(nothing, 1, 0, torch.zeros(0, dtype=torch.int64)).shape == nothing.shape


def test_constants_are_interpolated_between_64_and_224() -> None:
    defocus, pixelate = SEVERITIES["defocus-blur"], SEVERITIES["pixelate"]
    assert defocus.constants(5, 32) == defocus.constants(5, 64) == (1.5, 0.1)
    assert defocus.constants(5, 224) == defocus.constants(5, 500) == (10, 0.5)
    assert defocus.constants(5, 144) == pytest.approx((5.75, 0.3))
    assert pixelate.constants(5, 144)[0] == pytest.approx((1 / 0.65 + 4) / 2)  # pixel sizes, not fractions


# ---------------------------------------------------------------- noise


def test_gaussian_noise_statistics() -> None:
    for severity, sigma in zip(range(1, 6), (0.04, 0.06, 0.08, 0.09, 0.10), strict=True):
        values = corrupt(flat(128, 20), "gaussian-noise", severity, 0, torch.arange(20)).double() - 128
        assert abs(float(values.mean())) < 0.4
        assert float(values.std()) / 255 == pytest.approx(sigma, rel=0.02)


@pytest.mark.parametrize("photons", [500.0, 60.0, 3.0, 17.3])
def test_shot_noise_is_poisson(photons: float) -> None:
    levels = torch.tensor([0, 1, 60, 128, 255]).repeat_interleave(20_000).reshape(1, 1, 5, 20_000).float()
    draws = Draws(0, "shot-noise", torch.tensor([3]))
    counts = (CORRUPTIONS["shot-noise"](levels, draws, (photons,)) * photons / 255)[0, 0].double()
    assert float((counts - counts.round()).abs().max()) < 1e-3
    for level, row in zip((0, 1, 60, 128, 255), counts.round(), strict=True):
        rate = level / 255 * photons
        assert abs(float(row.mean()) - rate) < 5 * math.sqrt(rate / 20_000) + 1e-12
        assert float(row.var()) == pytest.approx(rate, rel=0.08, abs=0.01)
        low, high = stats.poisson.interval(0.98, rate)
        inside = float(((row >= low) & (row <= high)).double().mean())
        assert inside == pytest.approx(stats.poisson.cdf(high, rate) - stats.poisson.cdf(low - 1, rate), abs=0.006)


def test_shot_noise_inverts_the_distribution_exactly() -> None:
    levels = torch.arange(256.0).reshape(1, 1, 16, 16)
    draws = Draws(5, "shot-noise", torch.tensor([8]))
    u = (draws.bits24("photons", (1, 16, 16)).double().flatten().numpy() + 0.5) / 2**24
    for photons in (500.0, 50.0, 3.0):
        got = (CORRUPTIONS["shot-noise"](levels, draws, (photons,)) * photons / 255).round().flatten().numpy()
        assert np.array_equal(got, stats.poisson.ppf(u, np.arange(256) / 255 * photons).clip(0))


def test_impulse_noise_fractions() -> None:
    for severity, fraction in zip(range(1, 6), (0.01, 0.02, 0.03, 0.05, 0.07), strict=True):
        out = corrupt(flat(100, 40), "impulse-noise", severity, 0, torch.arange(40))
        for extreme in (0, 255):
            assert float((out == extreme).double().mean()) == pytest.approx(fraction / 2, rel=0.08)
        assert set(out.unique().tolist()) == {0, 100, 255}


# ---------------------------------------------------------------- blurs


@pytest.mark.parametrize("sigma", [0.05, 0.25, 0.4, 1.5])
def test_gaussian_blur_is_scipys(photos: torch.Tensor, sigma: float) -> None:
    ours = filters.gaussian_blur(photos.float(), sigma)
    theirs = ndimage.gaussian_filter(photos.numpy().astype(float), (0, 0, sigma, sigma), mode="nearest", truncate=4.0)
    assert np.abs(ours.numpy() - theirs).max() < 1e-3


@pytest.mark.parametrize(("side", "severity"), [(32, 1), (32, 3), (32, 4), (32, 5), (224, 2), (224, 5)])
def test_defocus_is_convolution_with_a_soft_disk(side: int, severity: int) -> None:
    images = photographs(1, side)
    radius, soft = SEVERITIES["defocus-blur"].constants(severity, side)
    reach = int(radius) + 3
    grid = np.arange(-reach, reach + 1)
    disk = (grid[:, None] ** 2 + grid**2 <= radius**2).astype(float)
    kernel = ndimage.gaussian_filter(disk / disk.sum(), soft, radius=1 if radius <= 8 else 2, mode="constant")
    theirs = ndimage.convolve(images[0].numpy().astype(float), kernel[None], mode="mirror")
    ours = corrupt(images, "defocus-blur", severity, 0, torch.tensor([0]))[0].numpy()
    assert np.abs(ours - theirs).max() < 0.51


def test_motion_blur_is_convolution_along_a_line(photos: torch.Tensor) -> None:
    ids = torch.arange(4)
    ours = corrupt(photos[:4], "motion-blur", 5, 0, ids)
    turns = Draws(0, "motion-blur", ids).integers("angle", filters.ANGLES).tolist()
    weights = np.exp(-0.5 * (np.arange(19) / 2.5) ** 2)
    for image, out, turn in zip(photos[:4], ours, turns, strict=True):
        angle = math.radians(-45 + 90 * (turn + 0.5) / 1024)
        kernel = np.zeros((37, 37))
        for i, weight in enumerate(weights / weights.sum()):
            kernel[18 + math.ceil(i * math.sin(angle) - 0.5), 18 + math.ceil(i * math.cos(angle) - 0.5)] += weight
        theirs = ndimage.correlate(image.numpy().astype(float), kernel[None], mode="nearest")
        assert np.abs(out.numpy() - theirs).max() < 0.52


def test_zoom_blur_is_the_mean_of_pillow_zooms(photos: torch.Tensor) -> None:
    out = corrupt(photos[:3], "zoom-blur", 5, 0, torch.arange(3)).numpy()
    for image, ours in zip(photos[:3].numpy(), out, strict=True):
        for channel, got in zip(image, ours, strict=True):
            picture, total = Image.fromarray(channel.astype(np.float32)), channel.astype(float)
            for i in range(26):
                z = 1 + i / 100
                edge = 16 - 16 / z  # Pillow counts from pixel corners, the zoom is about the same centre
                data = (1 / z, 0, edge, 0, 1 / z, edge)
                zoomed = picture.transform((32, 32), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR)
                total += np.asarray(zoomed)
            assert np.abs(got - total / 27).max() < 0.6


def test_glass_swaps_are_those_of_the_nested_loops() -> None:
    for height, width, reach, passes in ((8, 8, 1, 2), (11, 14, 1, 2), (20, 17, 3, 1), (30, 25, 4, 2)):
        jumps = rng.integers(4, torch.arange(3), (2 * reach + 1) ** 2, (passes, height, width))
        ours = filters.swap_pixels(height, width, reach, jumps)
        for sample in range(3):
            grid = np.arange(height * width).reshape(height, width)
            for turn in range(passes):
                for row in range(height - 1 - reach, reach - 1, -1):
                    for column in range(width - 1 - reach, reach - 1, -1):
                        dy, dx = divmod(int(jumps[sample, turn, row, column]), 2 * reach + 1)
                        there = row + dy - reach, column + dx - reach
                        grid[row, column], grid[there] = grid[there], grid[row, column]
            assert np.array_equal(ours[sample].numpy(), grid.ravel())


def test_the_published_glass_copies_as_the_references_nested_loops_do() -> None:
    """A tuple of views on both sides of the assignment: the second half writes what the first has just put there."""
    for height, width, reach, passes in ((8, 8, 1, 2), (11, 14, 1, 1), (20, 17, 3, 2)):
        jumps = rng.integers(4, torch.arange(2), (2 * reach) ** 2, (passes, height, width))
        ours = filters.swap_pixels(height, width, reach, jumps, copies=True)
        for sample in range(2):
            grid = np.arange(height * width).reshape(height, width, 1)
            for turn in range(passes):
                for row in range(height - reach, reach, -1):
                    for column in range(width - reach, reach, -1):
                        dy, dx = divmod(int(jumps[sample, turn, row, column]), 2 * reach)
                        there = row + dy - reach, column + dx - reach
                        grid[row, column], grid[there] = grid[there], grid[row, column]
            assert np.array_equal(ours[sample].numpy(), grid.ravel())


def test_published_zooms_are_as_many_as_numpy_counts(photos: torch.Tensor) -> None:
    ids = torch.arange(2)
    for severity, (end, zooms) in enumerate(((1.06, 7), (1.11, 12), (1.16, 16), (1.21, 21), (1.26, 26)), start=1):
        ours = corrupt(photos[:2], "zoom-blur", severity, 0, ids, published=True)
        assert len(np.arange(1, end, 0.01)) == zooms
        total = photos[:2].float()
        for number in range(zooms):
            total = total + filters.zoom(photos[:2].float(), 1 + number * 0.01)
        assert torch.equal(ours, (total / (zooms + 1)).round().to(torch.uint8))
        same = torch.equal(ours, corrupt(photos[:2], "zoom-blur", severity, 0, ids))
        assert same == (severity > 2)


def test_a_stream_can_have_the_published_slips(photos: torch.Tensor) -> None:
    ids = torch.arange(12)
    names = ("glass-blur", "fog")
    ours, theirs = (corrupt_mixed(photos, 5, 0, ids, names, published) for published in (False, True))
    differs = (ours != theirs).flatten(1).any(1)
    assert torch.equal(differs, mixed_choice(0, ids, names) == 0)


def test_glass_blur_keeps_the_pixels(photos: torch.Tensor) -> None:
    out = corrupt(photos, "glass-blur", 1, 0, torch.arange(12))  # its blur of 0.05 pixels does nothing
    assert torch.equal(out.flatten(2).sort(-1).values, photos.flatten(2).sort(-1).values)
    assert not torch.equal(out, photos)


# ---------------------------------------------------------------- weather


def test_plasma_spans_zero_to_one_and_smooths_with_decay() -> None:
    noise = rng.uniform(0, torch.arange(6), (64, 64)) * 2 - 1
    rough, smooth = filters.plasma(noise, 1.4), filters.plasma(noise, 3.0)
    for field in (rough, smooth):
        assert torch.equal(field.amin((1, 2)), torch.zeros(6))
        assert torch.equal(field.amax((1, 2)), torch.ones(6))
    assert float(smooth.diff(dim=1).abs().mean()) < 0.5 * float(rough.diff(dim=1).abs().mean())


def test_fog_scales_back_and_lowers_contrast(photos: torch.Tensor) -> None:
    out = corrupt(photos, "fog", 5, 0, torch.arange(12))
    assert bool((out.flatten(1).amax(1) <= photos.flatten(1).amax(1)).all())
    white = corrupt(flat(255, 8), "fog", 5, 0, torch.arange(8)).double()
    assert float(white.min()) == pytest.approx(255 / 2.5, abs=1)  # where the plasma is nought
    assert float(white.max()) == 255


def test_frost_is_the_image_under_a_bluish_texture() -> None:
    draws = Draws(0, "frost", torch.arange(40))
    black = CORRUPTIONS["frost"](torch.zeros(40, 3, 32, 32), draws, (1.0, 1.0)) / 255
    assert 0.35 < float(black.mean()) < 0.65
    assert float(black.std()) > 0.15
    assert bool((black[:, 2] >= black[:, 0]).all())
    assert float(black.min()) >= 0
    assert float(black.max()) <= 1
    out = corrupt(flat(100, 40), "frost", 5, 0, torch.arange(40)).double()
    assert np.abs(out.numpy() - (75 + 0.45 * 255 * black.double()).numpy()).max() < 0.51


def test_snow_brightens_and_a_half_turn_keeps_its_flakes() -> None:
    black = corrupt(flat(0, 50), "snow", 4, 0, torch.arange(50))
    assert torch.equal(black, black.flip((2, 3)))
    base = round(0.15 * 127.5)
    assert int(black.min()) == base  # where no flake falls
    assert 0.01 < float((black > base + 25).double().mean()) < 0.6


# ---------------------------------------------------------------- colour and geometry


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_brightness_is_hsv(photos: torch.Tensor, severity: int) -> None:
    add = (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]
    image = photos[0].clone()
    image[:, 0, 0] = 0
    ours = corrupt(image[None], "brightness", severity, 0, torch.tensor([0]))[0].permute(1, 2, 0).reshape(-1, 3)
    for pixel, got in zip(image.permute(1, 2, 0).reshape(-1, 3).double() / 255, ours, strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel.tolist())
        expected = np.array(colorsys.hsv_to_rgb(hue, saturation, min(1.0, value + add))) * 255
        assert np.abs(expected - got.numpy()).max() < 0.501


@pytest.mark.parametrize("severity", [1, 5])
def test_contrast_is_about_the_channel_mean(photos: torch.Tensor, severity: int) -> None:
    factor = (0.75, 0.15)[severity // 5]
    values = photos.numpy().astype(float)
    mean = values.mean((2, 3), keepdims=True)
    out = corrupt(photos, "contrast", severity, 0, torch.arange(12)).numpy()
    assert np.abs(out - ((values - mean) * factor + mean)).max() < 0.501


def test_elastic_affine_takes_the_moved_points_back() -> None:
    rows, columns = (t[0] for t in filters.pixel_grid(torch.zeros(1, 1, 96, 96)))
    ramps = torch.stack((columns, rows, rows))[None] * 2  # an image that shows where each pixel was read
    draws = Draws(0, "elastic", torch.tensor([6]))
    out = CORRUPTIONS["elastic"](ramps, draws, (0.0, 0.0, 0.08))[0] / 2
    moves = draws.symmetric("points", (3, 2))[0].numpy() * 96 * 0.08
    points = np.array([[80, 80], [80, 16], [16, 16]], dtype=float)
    for point, move in zip(points, moves, strict=True):
        column, row = point + move
        read = [ndimage.map_coordinates(out[axis].numpy(), [[row], [column]], order=1)[0] for axis in (0, 1)]
        assert read == pytest.approx(point.tolist(), abs=0.02)


def test_elastic_field_is_scipys(photos: torch.Tensor) -> None:
    draws, constants = Draws(0, "elastic", torch.tensor([6])), (0.1, 0.03, 0.0)
    out = CORRUPTIONS["elastic"](photos[:1].float(), draws, constants)[0].numpy()
    noise = draws.symmetric("field", (2, 32, 32))[0].double().numpy()
    moves = [ndimage.gaussian_filter(part, 0.96, mode="nearest", truncate=3.0) * 3.2 for part in noise]
    where = np.meshgrid(np.arange(32.0), np.arange(32.0), indexing="ij")
    for channel, got in zip(photos[0].numpy().astype(float), out, strict=True):
        places = [where[0] + moves[0], where[1] + moves[1]]
        assert np.abs(ndimage.map_coordinates(channel, places, order=1, mode="mirror") - got).max() < 0.05


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 64), (224, 224), (37, 53), (8, 9)])
def test_pixelate_is_pillows_box(height: int, width: int) -> None:
    image = photographs(1, 224)[0, :, :height, :width]
    for severity in range(1, 6):
        fraction = 1 / SEVERITIES["pixelate"].constants(severity, min(height, width))[0]
        picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        small = picture.resize((int(width * fraction + 1e-9), int(height * fraction + 1e-9)), Image.Resampling.BOX)
        theirs = np.asarray(small.resize((width, height), Image.Resampling.BOX))
        ours = corrupt(image[None], "pixelate", severity, 0, torch.tensor([0]))[0].permute(1, 2, 0).numpy()
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 64), (128, 128), (37, 54), (9, 23)])
def test_jpeg_is_pillows(height: int, width: int, channels: int) -> None:
    images = photographs(3, 128, channels)[:, :, :height, :width].contiguous()
    for quality in (80, 50, 25, 7):
        ours = filters.jpeg(images.float(), quality)
        for image, got in zip(images, ours, strict=True):
            array = image.permute(1, 2, 0).numpy()
            buffer = io.BytesIO()
            Image.fromarray(array if channels == 3 else array[:, :, 0]).save(buffer, "JPEG", quality=quality)
            theirs = np.asarray(Image.open(buffer)).reshape(height, width, channels).astype(float)
            gap = np.abs(got.permute(1, 2, 0).numpy() - theirs)
            assert gap.mean() < 0.15  # now and then a coefficient lies so near a tie that it rounds the other way
            assert (gap > 2).mean() < 0.02


@pytest.mark.parametrize(
    "name", ["gaussian-noise", "shot-noise", "defocus-blur", "glass-blur", "contrast", "pixelate", "jpeg", "elastic"]
)
def test_the_mean_is_kept(name: str) -> None:
    images = (photographs(30, 32).float() * 0.4 + 70).to(torch.uint8)  # away from the clips
    out = corrupt(images, name, 5, 0, torch.arange(30))
    assert float(out.double().mean()) == pytest.approx(float(images.double().mean()), abs=1.0)


# ---------------------------------------------------------------- mixtures and mistakes


def test_mixed_is_uniform_and_a_function_of_the_id() -> None:
    choice = mixed_choice(0, torch.arange(30_000))
    assert stats.chisquare(choice.bincount(minlength=15).numpy()).pvalue > 1e-3
    assert torch.equal(mixed_choice(0, torch.tensor([17, 5])), choice[[17, 5]])
    assert not torch.equal(mixed_choice(1, torch.arange(100)), choice[:100])


def test_mixed_applies_what_it_chose() -> None:
    images, ids = photographs(40, 32), torch.arange(40) * 3
    out, choice = corrupt_mixed(images, 5, 9, ids), mixed_choice(9, ids)
    for i in range(40):
        one = corrupt(images[i : i + 1], NAMES[int(choice[i])], 5, 9, ids[i : i + 1])
        assert torch.equal(out[i : i + 1], one)
    two = corrupt_mixed(images, 5, 9, ids, names=("fog", "jpeg"))
    for i, name in enumerate(("fog", "jpeg")):
        chosen = mixed_choice(9, ids, ("fog", "jpeg")) == i
        assert 5 < int(chosen.sum()) < 35
        assert torch.equal(two[chosen], corrupt(images[chosen], name, 5, 9, ids[chosen]))


def test_mistakes_get_a_sentence() -> None:
    images, ids = flat(1, 2), torch.arange(2)
    with pytest.raises(UserError, match=r"^unknown corruption 'rain': choose from gaussian-noise, .*, jpeg$"):
        corrupt(images, "rain", 1, 0, ids)
    with pytest.raises(UserError, match=r"^unknown corruption 'rain', 'hail': choose from gaussian-noise"):
        corrupt_mixed(images, 1, 0, ids, names=("rain", "fog", "hail"))
    with pytest.raises(UserError, match=r"at least one corruption: choose from gaussian-noise"):
        corrupt_mixed(images, 1, 0, ids, names=())
    for severity in (0, 6, -1):
        with pytest.raises(UserError, match=f"^severity must be 1, 2, 3, 4 or 5, not {severity}$"):
            corrupt(images, "fog", severity, 0, ids)
    with pytest.raises(UserError, match=r"must be uint8 .* not torch.float32 \[2, 3, 32, 32\]$"):
        corrupt(images.float(), "fog", 1, 0, ids)
    for wrong in (images[0], images[:, :2]):
        with pytest.raises(UserError, match="must be uint8"):
            corrupt(wrong, "fog", 1, 0, ids)
    with pytest.raises(UserError, match=r"^images to corrupt must have 8 x 8 pixels or more, not 7 x 32$"):
        corrupt(images[:, :, :7], "fog", 1, 0, ids)
    with pytest.raises(UserError, match=r"^2 images need as many sample ids, not \[3\]$"):
        corrupt(images, "fog", 1, 0, torch.arange(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_gpu_agrees(name: str, photos: torch.Tensor) -> None:
    ids = torch.arange(12)
    on_gpu = corrupt(photos.cuda(), name, 5, 0, ids)
    gap = (on_gpu.cpu().int() - corrupt(photos, name, 5, 0, ids).int()).abs()
    assert float((gap > 1).double().mean()) < 1e-3
    assert float((gap > 0).double().mean()) < 0.01
    order = torch.randperm(12)
    assert torch.equal(corrupt(photos[order].cuda(), name, 5, 0, ids[order]), on_gpu[order.cuda()])
    assert torch.equal(corrupt(photos[4:5].cuda(), name, 5, 0, ids[4:5]), on_gpu[4:5])
