/** What surrogate.f90 does, in Java: a solver of Burgers' equation that trains a network while it runs, on all ranks. */
public class Surrogate {
  static native long join();
  static native void leave(long world);
  static native int rank(long world);
  static native int size(long world);
  static native long create(long world, String module, String configuration);
  static native double call(long model, double[] inputs, double[] outputs, boolean learn);

  static final int CELLS = 64;

  static double[] part(double[] of, int first, int cells, int width) {
    return java.util.Arrays.copyOfRange(of, first * width, (first + cells) * width);
  }

  public static void main(String[] arguments) {
    System.loadLibrary("surrogate_jni");
    final double dt = 0.002, dx = 1.0 / CELLS, viscosity = 0.01;
    final long world = join();
    final int cells = CELLS / size(world), first = rank(world) * cells;
    final long model = create(world, "net.pt", "{\"optimizer\": {\"type\": \"adam\", \"lr\": 0.01}, \"loss\": \"mse\","
        + " \"lr_scheduler\": {\"type\": \"cosine_annealing\", \"t_max\": 300}}");
    final double[] u = new double[CELLS], stencil = new double[3 * CELLS], rate = new double[CELLS];
    for (int i = 0; i < CELLS; ++i) u[i] = Math.sin(2 * Math.PI * (i + 1) * dx);
    for (int step = 1; step <= 300; ++step) {
      for (int i = 0; i < CELLS; ++i) {
        final double left = u[(i + CELLS - 1) % CELLS], right = u[(i + 1) % CELLS];
        stencil[3 * i] = left;
        stencil[3 * i + 1] = u[i];
        stencil[3 * i + 2] = right;
        rate[i] = -u[i] * (right - left) / (2 * dx) + viscosity * (right - 2 * u[i] + left) / (dx * dx);
      }
      final double loss = call(model, part(stencil, first, cells, 3), part(rate, first, cells, 1), true);
      for (int i = 0; i < CELLS; ++i) u[i] += dt * rate[i];
      if (rank(world) == 0 && step % 100 == 0) System.out.printf("step %d: loss %.4f%n", step, loss);
    }
    call(model, stencil, rate, false);
    double learned = 0;
    for (int i = 0; i < CELLS; ++i) learned += rate[i] * stencil[3 * i + 1];
    if (rank(world) == 0) System.out.println("learned " + learned + " over " + size(world) + " ranks");
    leave(world);
  }
}
