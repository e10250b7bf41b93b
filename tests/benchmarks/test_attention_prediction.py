"""The prediction from machine code: which instructions count, and what they cost."""

import shutil

import pytest

from lib.benchmarks import attention_prediction as prediction

# A loop of two matmuls with a part that is jumped over, inside a loop over heads.
CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;      /* 0x00000a0000017a02 */
        /*0010*/                   HMMA.1688.F32 R8, R4, R6, RZ ;
        /*0020*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0030*/               @P0 BRA 0x60 ;
        /*0040*/                   FSEL R8, R8, -INF , !P1 ;
        /*0050*/                   FSEL R9, R9, -INF , !P2 ;
        /*0060*/                   HMMA.1688.F32 R8, R4, R6, R8 ;
        /*0070*/               @P3 BRA 0x90 ;
        /*0080*/                   STS.128 [R3], R12 ;
        /*0090*/                   MUFU.EX2 R8, R8 ;
        /*00a0*/              @!P0 BRA 0x20 ;
        /*00b0*/              @!P1 BRA 0x10 ;
        /*00c0*/                   EXIT ;
"""


def test_the_innermost_loop_counts_without_what_most_rounds_jump_over():
    assert prediction.main_loop(CODE) == {
        "LDSM.16.M88.4": 1,
        "BRA": 3,
        "HMMA.1688.F32": 1,
        "STS.128": 1,
        "MUFU.EX2": 1,
    }


def test_cycles_are_of_the_pipe_that_an_instruction_occupies():
    cycles = prediction.pipe_cycles(prediction.main_loop(CODE), prediction.T4)
    assert cycles == {
        "scheduler": 7,
        "matrices from shared memory": 32,
        "tensor": 8,
        "memory": 8,
        "special": 8,
    }


def test_one_share_of_the_sum_predicts_all_kernels_on_both_chips():
    def code(chip: prediction.Chip, tensor: float, alu: float) -> prediction.Round:
        cycles = {"scheduler": 10.0, "tensor": tensor, "alu": alu}
        return prediction.Round(chip, 10**6, cycles)

    here = {("a", 64): code(prediction.H200, 100, 100), ("b", 64): code(prediction.H200, 300, 100)}
    there = {("a", 64): code(prediction.T4, 400, 0), ("b", 64): code(prediction.T4, 300, 300)}
    # one takes 0.7 of the sum of its pipes and the other 0.9: 0.8 on average
    measured = {
        case: here[case].tflops(share * here[case].sum) for case, share in zip(here, (0.7, 0.9))
    }
    first, second = prediction.predict(here, there, measured)
    assert first["predicted / measured"] == pytest.approx(0.7 / 0.8)
    assert second["predicted / measured"] == pytest.approx(0.9 / 0.8)
    # no faster than the busiest pipe
    assert first["predicted "] == there["a", 64].tflops(400)
    assert second["predicted "] == pytest.approx(there["b", 64].tflops(0.8 * 600))


def test_a_t4s_tensor_cores_at_their_bound_reach_its_datasheet():
    matmuls = {"HMMA.1688.F32": 1000}
    cycles = prediction.pipe_cycles(matmuls, prediction.T4)["tensor"]
    flops = 1000 * 2 * 16 * 8 * 8
    chip = prediction.T4
    tflops = flops / cycles * 4 * chip.multiprocessors * chip.gigahertz / 1000
    assert tflops == pytest.approx(chip.peak, rel=0.01)


@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="needs cuobjdump")
def test_the_code_of_a_t4_multiplies_as_often_as_its_tiles_say(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loop = prediction.main_loop(prediction.disassemble("forward", 64, "sm_75"))
    tiles = prediction.launch.TILES["forward", 64]
    flops = 2 * 2 * tiles.rows // tiles.warps * tiles.columns * 64
    assert loop["HMMA.1688.F32"] == flops / (2 * 16 * 8 * 8)
