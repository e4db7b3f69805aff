// Mixtures of patch attention on one core: a part of patch_attention_kernel.cpp, inside its namespaces.
#pragma once

template <class T, class D> CO_INLINE D* point_of(const PatchMix& a, int64_t b, int64_t h, int64_t p, int64_t x, int64_t channel) {
  return static_cast<D*>(a.to.data) + b * a.to.batch + h * a.to.head + a.to.patch[p] + a.to.point[x] + channel;  // contiguous channels
}

template <class T, class D> CO_INLINE void store_row(const PatchMix& a, int64_t b, int64_t h, int64_t p, const Piece& at, const T* from) {
  const T* weights = weights_of<T>(a.to_weights, b, p);
  const int64_t channels = at.channels();
  if (a.stream && !weights && vectors_of<T, D>(a.to, at) && channels * sizeof(T) % 64 == 0 &&
      reinterpret_cast<uintptr_t>(point_of<T, D>(a, b, h, p, at.x_begin, at.c_begin)) % 64 == 0) {
    for (int64_t x = at.x_begin; x < at.x_end; ++x) {
      T* point = reinterpret_cast<T*>(point_of<T, D>(a, b, h, p, x, at.c_begin));
      for (int64_t c = 0; c < channels; c += lanes<T>, from += lanes<T>) stream(point + c, load_unaligned(from));
    }
    return;
  }
  for (int64_t x = at.x_begin; x < at.x_end; ++x, from += channels) {
    D* point = point_of<T, D>(a, b, h, p, x, at.c_begin);
    const T w = weights ? weights[a.to_weights.point[x]] : T(1);
    if (w == T(0)) {
      for (int64_t c = 0; c < channels && !a.add; ++c) narrow(T(0), point + c);
    } else if (a.add) {
      for (int64_t c = 0; c < channels; ++c) narrow(T(widen(point[c])) + from[c] * w, point + c);
    } else if (sizeof(D) == sizeof(T) && channels % lanes<T> == 0) {
      T* same = reinterpret_cast<T*>(point);
      const Vec<T> factor = broadcast(w);
      for (int64_t c = 0; c < channels; c += lanes<T>) store_unaligned(same + c, load_unaligned(from + c) * factor);
    } else {
      for (int64_t c = 0; c < channels; ++c) narrow(from[c] * w, point + c);
    }
  }
}

template <class T, class S>
void add_weights_gradient(const PatchMix& a, int64_t b, int64_t h, int64_t p, const Piece& at, const T* mixed, T* sum) {
  const S* query = static_cast<const S*>(a.query.data) + b * a.query.batch + h * a.query.head + a.query.patch[p];
  for (int64_t x = at.x_begin; x < at.x_end; ++x, mixed += at.channels()) {
    const S* point = query + a.query.point[x] + at.c_begin * a.query.channel;
    T dot = 0;
    for (int64_t c = 0; c < at.channels(); ++c) dot = fma(T(widen(point[c * a.query.channel])), mixed[c], dot);
    sum[x - at.x_begin] += dot;
  }
}

// The pieces of a call, one after the other, and their packing.
template <class T, class S> struct MixPieces {
  static constexpr int64_t P = Tiles<T>::PANEL, L = lanes<T>;
  struct Packed {
    int64_t h, x, channel, begin;
    Piece at;
    int64_t depth;
    T* panels;
  };
  const PatchMix& a;
  const int64_t b, point_begin, point_end, step;
  T *panels[2], *row;

  bool fill(Packed& p) const {
    p.at = {p.x, smaller(p.x + step, point_end), p.channel, smaller(p.channel + DEPTH, a.from.channels)};
    p.depth = smaller(a.depth - p.begin, MIX_DEPTH);
    return true;
  }
  bool next(Packed& p) const {
    p.panels = p.panels == panels[0] ? panels[1] : panels[0];
    if ((p.begin += MIX_DEPTH) < a.depth) return fill(p);
    p.begin = 0;
    if ((p.channel += DEPTH) < a.from.channels) return fill(p);
    p.channel = 0;
    if ((p.x += step) < point_end) return fill(p);
    p.x = point_begin;
    return ++p.h < a.heads && fill(p);
  }
  Pace pace(const Packed& p, int64_t tiles, int64_t depth) const {
    Pace pace(p.depth, p.depth, p.at.x_end - p.at.x_begin, tiles, depth);
    pace.rows = Ahead(a.from, sizeof(S), b, p.h, p.begin, p.depth, p.at);
    return pace;
  }
  void pack(const Packed& p, int64_t unit, int64_t end) const {
    if (unit >= end) return;
    const int64_t columns = p.at.size();
    if (vectors_of<T, S>(a.from, p.at) && columns % P == 0 && !a.from_weights.data && !a.hide) {
      const T* from = static_cast<const T*>(a.from.data) + b * a.from.batch + p.h * a.from.head + p.at.c_begin;
      for (; unit < end; ++unit) {
        const T* patch = from + a.from.patch[p.begin + unit];
        T* to = p.panels + unit * P;
        for (int64_t x = p.at.x_begin, i = 0; x < p.at.x_end; ++x) {
          for (int64_t c = 0; c < p.at.channels(); c += L, i += L) {
            store(to + i % P, load_unaligned(patch + a.from.point[x] + c));
            if (i % P == P - L) to += p.depth * P;
          }
        }
      }
      return;
    }
    for (int64_t i = columns; i < round_up(columns, P); ++i) row[i] = 0;
    for (; unit < end; ++unit) {
      const int64_t j = p.begin + unit;
      load_row<T, S>(a.from, b, p.h, j, p.at, weights_of<T>(a.from_weights, b, j), a.from_weights.point, a.hide, row);
      for (int64_t i = 0; i < columns; i += P) {
        T* to = p.panels + i * p.depth + unit * P;
        store(to, load(row + i));
        store(to + L, load(row + i + L));
      }
    }
  }
};

template <class T, class S>
void mix(const PatchMix& a, int64_t b, int64_t row_offset, int64_t row_begin, int64_t row_end, int64_t point_begin, int64_t point_end,
         void* scratch) {
  constexpr int64_t P = Tiles<T>::PANEL, L = lanes<T>;
  const int64_t width = panel_columns<T>(), channels = a.from.channels, count = row_end - row_begin, points = point_end - point_begin;
  if (channels == 0 || count == 0 || points == 0 || a.heads == 0) return;
  Arena<T> arena{static_cast<char*>(scratch)};
  MixPieces<T, S> pieces{a, b, point_begin, point_end, chunk_points(channels), {}, nullptr};
  for (T*& p : pieces.panels) p = arena.take(MIX_DEPTH * width);
  pieces.row = arena.take(width);
  T* mixed = arena.take(ROW_BLOCK * width);
  T* weights_sum = arena.take(ROW_BLOCK * MIX_RUN * DEPTH);
  T* rows = arena.take(ROW_BLOCK * MIX_SPACING);
  for (int64_t i = 0; a.weights_gradient.data && i < count * points; ++i) weights_sum[i] = 0;
  const RowTiles<T> heights(count);
  typename MixPieces<T, S>::Packed now{0, point_begin, 0, 0, {}, 0, pieces.panels[0]};
  pieces.fill(now);
  {
    Pace first = pieces.pace(now, 1, 0);
    for (int64_t unit = 0; unit < first.units(); ++unit) first.ask_to(unit + AHEAD), pieces.pack(now, unit, unit + 1);
  }
  const T* copied = nullptr;
  for (bool more = true; more;) {
    auto next = now;
    more = pieces.next(next);
    const T* matrix = static_cast<const T*>(a.matrix) + ((b - a.first) * a.heads + now.h) * a.head_stride + row_begin * a.depth + now.begin;
    if (matrix != copied) {
      for (int64_t r = 0; r < count; ++r) __builtin_memcpy(rows + r * MIX_SPACING, matrix + r * a.depth, now.depth * sizeof(T));
      copied = matrix;
    }
    const int64_t columns = now.at.size(), depth = now.depth, panels = (columns + P - 1) / P;
    const bool last = now.begin + depth >= a.depth;
    Pace pace = more ? pieces.pace(next, panels * heights.tiles, depth) : Pace();
    int64_t packed = 0;
    for (int64_t r = 0, i = 0, height; r < count; r += height, ++i) {
      height = heights.rows_at(r, i);
      Piece done{now.at.x_begin, now.at.x_begin, now.at.c_begin, now.at.c_end};  // points that the next tile completes
      for (int64_t j = 0; j < columns; j += P) {
        done.x_begin = done.x_end;
        done.x_end = now.at.x_begin + smaller(j + P, columns) / now.at.channels();
        for (int64_t k = r; last && !a.stream && k < r + height; ++k) {
          for (int64_t x = done.x_begin; x < done.x_end; ++x) {
            const int64_t p = row_offset + row_begin + k, n = now.at.channels();
            if (a.wide) prefetch_point<true>(reinterpret_cast<const char*>(point_of<T, T>(a, b, now.h, p, x, done.c_begin)), n * sizeof(T));
            else prefetch_point<true>(reinterpret_cast<const char*>(point_of<T, S>(a, b, now.h, p, x, done.c_begin)), n * sizeof(S));
          }
        }
        const T* panel = now.panels + j * depth;
        T* to = mixed + r * width;
        if (columns - j > L) tile_of<T, 2, int(MIX_SPACING)>(height, rows + r * MIX_SPACING, panel, depth, now.begin > 0, to + j, width, pace);
        else tile_of<T, 1, int(MIX_SPACING)>(height, rows + r * MIX_SPACING, panel, depth, now.begin > 0, to + j, width, pace);
        to += (done.x_begin - now.at.x_begin) * now.at.channels();
        for (int64_t k = r; last && done.x_begin < done.x_end && k < r + height; ++k, to += width) {
          const int64_t p = row_offset + row_begin + k;
          if (a.weights_gradient.data) add_weights_gradient<T, S>(a, b, now.h, p, done, to, weights_sum + k * points + done.x_begin - point_begin);
          if (a.wide) store_row<T, T>(a, b, now.h, p, done, to);
          else store_row<T, S>(a, b, now.h, p, done, to);
        }
        pieces.pack(next, packed, pace.ready()), packed = pace.ready();
      }
    }
    now = next;
  }
  if (a.stream) finish_streams();
  for (int64_t r = 0; a.weights_gradient.data && r < count; ++r) {
    const int64_t p = row_offset + row_begin + r;
    const T* w = weights_of<T>(a.to_weights, b, p);
    T* to = static_cast<T*>(a.weights_gradient.data) + b * a.weights_gradient.batch + a.weights_gradient.patch[p];
    for (int64_t i = 0; i < points; ++i) {
      const bool dead = w[a.to_weights.point[point_begin + i]] == T(0);
      to[a.weights_gradient.point[point_begin + i]] = dead ? T(0) : weights_sum[r * points + i];
    }
  }
}
