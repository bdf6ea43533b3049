/* Clears what decode.h and observe.h were included with, for the next type. */
#undef COMPRESS
#undef OBSERVE
#undef FN
#undef CAT
#undef CAT_
#undef NAME
#undef ELEM
#undef TO_F32
#undef FROM_F32
#undef LOAD
#undef LOAD_PAIR
#undef IN_ORDER
