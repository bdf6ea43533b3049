/* Clears what decode.h, observe.h and gate.h were included with, for the next type. */
#undef COPY_KEPT
#undef ORDER_RINGS
#undef TAKE_BACK
#undef OBSERVE
#undef GATE
#undef FN
#undef CAT
#undef CAT_
#undef NAME
#undef ELEM
#undef SCALED
#ifdef H2O_KV_IS_ELEM
#undef KV
#undef KV_TO_F32
#undef KV_FROM_F32
#undef KV_LOAD
#undef KV_LOAD_PAIR
#undef KV_IN_ORDER
#undef H2O_KV_IS_ELEM
#endif
#undef TO_F32
#undef FROM_F32
#undef LOAD
#undef LOAD_PAIR
#undef IN_ORDER
