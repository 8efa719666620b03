"""Machine code that reads what nothing wrote is found."""

from sass import misled_products, unset_registers

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
    for line in ("STS.64 [R0+UR7+0x400], R0 ;", "SYNCS.EXCH.64 URZ, [UR7+0x400], UR8 ;"):
        assert unset_registers(GOOD + f"        /*0000*/   {line}\n") == []


LOOP = """
        /*0000*/                   LDC R2, c[0x0][0x210] ;
        /*0010*/                   S2R R4, SR_CgaCtaId ;
        /*0020*/                   R2UR UR8, R4 ;
        /*0030*/                   UIADD3.64 UR10, UR8, 0x2, URZ ;
        /*0040*/                   STL.64 [R1+0x8], R4 ;
.L_x_1:
        /*0050*/                   LDG.E R60, desc[UR4][R2.64] ;
        /*0060*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8].tnspA, R24, gsb0 ;
        /*0070*/                   LDL.64 R60, [R1+0x8] ;
        /*0080*/                   R2UR UR10, R60 ;
        /*0090*/               @P0 BRA `(.L_x_1) ;
"""


def test_places_of_shared_memory_come_from_no_data():
    assert misled_products(LOOP) == []
    wrong = LOOP.replace("R2UR UR8, R4", "R2UR UR8, R2")
    assert [line.split()[1] for line in misled_products(wrong)] == ["HGMMA.64x32x16.F32.BF16"]


def test_what_a_turn_leaves_behind_is_seen():
    assert len(misled_products(LOOP.replace("LDL.64 R60, [R1+0x8]", "LDL.64 R62, [R1+0x8]"))) == 1
