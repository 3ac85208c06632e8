/** Sums over ranks from Java, through the JNI functions in lockstep_jni.c. */
public class Sums {
  static {
    System.loadLibrary("lockstep_jni");
  }

  static native long join();

  static native void leave(long group);

  static native int rank(long group);

  static native int size(long group);

  /** Replaces the values by their sums over all ranks. */
  static native void allReduce(long group, float[] values);

  public static void main(String[] arguments) {
    long world = join();
    float[] values = new float[1000];
    int state = rank(world);
    for (int i = 0; i < values.length; ++i) {
      state = state * 1664525 + 1013904223;
      values[i] = (float) (state >>> 8) / 16777216.0f - 0.5f;
    }
    allReduce(world, values);
    int hash = 0x811c9dc5;
    for (float value : values) hash = (hash ^ Float.floatToRawIntBits(value)) * 16777619;
    if (rank(world) == 0) System.out.printf("sums %08x over %d ranks%n", hash, size(world));
    leave(world);
  }
}
