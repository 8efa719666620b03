"""Machine code that reads what nothing wrote is found."""

from sass import unset_registers

GOOD = """
        /*0000*/                   S2UR UR8, SR_CTAID.X ;
        /*0010*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0020*/                   UIADD3 UR6, UP0, UR8, 0x40, URZ ;
        /*0030*/                   UIADD3.64 UR10, UR4, 0x2, URZ ;
        /*0038*/                   CS2R R64, SRZ ;
        /*0040*/               @P0 LDG.E.128 R60, desc[UR4][R64.64] ;
        /*0050*/                   UMOV UR7, 0x40000040 ;
        /*0060*/                   HGMMA.64x32x16.F32 R24, gdesc[UR4], RZ, !UPT ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, R60, gdesc[UR8], R24, gsb0 ;
"""


def test_a_register_is_set_before_it_is_read():
    assert unset_registers(GOOD) == []


def test_a_lost_definition_is_found():
    lost = "/*0015*/                   UIADD3 UR46, UP0, UR46, 0x40, URZ ;"
    assert unset_registers(GOOD + f"        {lost}\n") == [lost]
    assert len(unset_registers(GOOD.replace("UMOV UR7", "UMOV UR9"))) == 1
    lost = "/*0015*/                   IADD3 R6, P0, R6, 0x40, RZ ;"
    assert unset_registers(GOOD + f"        {lost}\n") == [lost]


def test_bits_of_predicates_may_begin_unset():
    assert (
        unset_registers("        /*0000*/   LOP3.LUT R180, R180, 0xffffdfff, RZ, 0xc0, !PT ;") == []
    )


def test_an_address_in_shared_memory_is_one_register():
    assert unset_registers(GOOD + "        /*0000*/   STS.64 [R0+UR7+0x400], R0 ;\n") == []
